"""Tiny models in place of those that a suite loads from the hub: same architecture, random weights."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

#: Sizes by name of the config's field.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    "vocab_size": 1000,
    "rotary_dim": 8,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHORT = {"gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration", "qwen2": "Qwen2ForCausalLM"}
_NAME = re.compile(r"[\w-]+/tiny-(?:random-|dummy-)?(\w+)")


def stand_in(name: Any, folder: Path) -> Any:
    """The folder of a tiny model for a name like `owner/tiny-random-GPT2LMHeadModel`; any other name as it is."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    kind = None if match is None else getattr(transformers, _SHORT.get(match[1], match[1]), None)
    config_class = getattr(kind, "config_class", None)
    if kind is None or config_class is None:
        return name
    target = folder / match[1]  # type: ignore[index]
    if not (target / "config.json").exists():
        known = config_class().to_dict()
        config = config_class(**{field: value for field, value in _SIZES.items() if field in known})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            kind(config).save_pretrained(target)
    return str(target)


def install_stand_ins(folder: Path) -> None:
    """Redirects the loaders of models and configs to the stand-ins."""
    transformers.PreTrainedModel.from_pretrained = _redirected(transformers.PreTrainedModel, "from_pretrained", folder)
    PreTrainedConfig.get_config_dict = _redirected(PreTrainedConfig, "get_config_dict", folder)


def _redirected(owner: type, name: str, folder: Path) -> Any:
    original: Callable[..., Any] = owner.__dict__[name].__func__

    @functools.wraps(original)
    def wrapped(cls: Any, *args: Any, **kwargs: Any) -> Any:
        name = "pretrained_model_name_or_path"
        if name in kwargs:
            kwargs[name] = stand_in(kwargs[name], folder)
        return original(cls, *(stand_in(value, folder) for value in args[:1]), *args[1:], **kwargs)

    return classmethod(wrapped)
