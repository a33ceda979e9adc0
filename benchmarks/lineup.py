"""The subjects at each level: the bare model, the stock model, a patched copy for each scheme, and peers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.bare import AddsNothing, NoPhases, Nothing, reduce_to_attention, shared_copy, without_rotation
from benchmarks.levels import LEVELS, PATCH, image_side
from benchmarks.machine import DTYPES
from benchmarks.peers import peer_subjects
from benchmarks.subjects import BARE, ROOM, STOCK, AttentionCall, ImageClassifier, LanguageModel, Setting, Subject
from hf_posenc import BuildContext, DistanceBias, PositionEncodingError, SchemeConfig, patch_model
from hf_posenc.schemes import as_scheme
from hf_posenc.schemes.registry import parse_scheme

CONTROL = "bare again"
REFERENCES = (BARE, CONTROL, STOCK)
#: Attention backends that may follow the `@` of a scheme.
BACKENDS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


def build_lineup(
    level: str, schemes: Sequence[str], peers: Sequence[str], length: int, setting: Setting
) -> tuple[list[Subject], dict[str, str]]:
    """Returns all subjects of a level that support `length` tokens, and the reasons why others are missing, by name.
    Models share their weights.
    """
    torch.manual_seed(setting.seed)
    setting, kind = setting.at(level), LEVELS[level].kind
    base = base_model(level, length, setting)
    subjects: list[Subject] = []
    left_out: dict[str, str] = {}
    for name in schemes:
        model = shared_copy(base)
        try:
            family = place(name, model, level)
        except PositionEncodingError as error:
            left_out[name] = f"refused: {error}"
            continue
        around = without_rotation if family == BARE and kind in ("attention", "llama") else nullcontext
        if kind == "attention":
            subjects.append(_attention_call(name, family, model.model, setting, around))
        elif kind == "vit":
            subjects.append(ImageClassifier(name, family, setting, model=model))
        else:
            subjects.append(LanguageModel(name, family, setting, around=around, model=model))
    if kind == "attention":
        others, missing = peer_subjects(peers, setting)
        subjects += others
        left_out |= missing
    return subjects, left_out


def scheme_family(config: SchemeConfig) -> str:
    """Returns the kind of a scheme, determined by the parts that it builds."""
    if ".position_maps." in type(config).__module__:
        return "position map"
    parts = config.build(BuildContext(hidden_size=512, num_heads=8, head_dim=64, max_positions=512))
    if parts.logit_bias is not None:
        return "distance bias" if isinstance(parts.logit_bias, DistanceBias) else "content bias"
    if parts.query_key_map is not None:
        return "rotation"
    if parts.additive is not None:
        return "additive"
    return "temperature" if parts.logit_scale is not None else "none"


def base_model(level: str, length: int, setting: Setting) -> Any:
    """Returns a stock model of a level, with random weights and no dropout, that supports `length + 1` tokens."""
    sizes, kind = setting.sizes, LEVELS[level].kind
    shape: dict[str, Any] = {
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": 1 if kind == "attention" else sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "intermediate_size": sizes.intermediate_size,
        "attn_implementation": "sdpa",
    }
    # A cache of `length` tokens and the token after it.
    text = {"vocab_size": sizes.vocab_size, "max_position_embeddings": length + ROOM, "pad_token_id": None}
    # The random numbers of dropout would cause most of the noise, and have nothing to do with positions.
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: Any
    if kind == "vit":
        config = ViTConfig(**shape, **no_dropout, image_size=image_side(length), patch_size=PATCH)
        model = ViTForImageClassification(config)
    elif kind == "bert":
        model = BertForMaskedLM(BertConfig(**shape, **text, **no_dropout))
    else:
        heads = sizes.num_key_value_heads
        config = LlamaConfig(**shape, **text, num_key_value_heads=heads, bos_token_id=None, eos_token_id=None)
        model = LlamaForCausalLM(config)
    return model.to(setting.device, DTYPES[setting.dtype])


def place(name: str, model: Any, level: str) -> str:
    """Patches a model in place, or removes its positions. Returns the family of the subject."""
    name, _, backend = name.partition("@")
    if backend:
        model.set_attn_implementation(backend)
    if name == STOCK:
        return STOCK
    if name in (BARE, CONTROL):
        kind = LEVELS[level].kind
        if kind == "bert":
            model.bert.embeddings.position_embeddings = AddsNothing()
        elif kind == "vit":
            del model.vit.embeddings.position_embeddings
            model.vit.embeddings.position_embeddings = Nothing()
        else:
            model.model.rotary_emb = NoPhases()
        return BARE
    together = name.split("+")
    config = parse_scheme(name) if ":" in name else as_scheme(together if len(together) > 1 else name)
    with warnings.catch_warnings():
        # The warnings are about trained weights and generate(), which are not used here.
        warnings.simplefilter("ignore", UserWarning)
        patch_model(model, config)
    return backend or scheme_family(config)


def _attention_call(name: str, family: str, stack: Any, setting: Setting, around: Any) -> Subject:
    reduce_to_attention(stack)

    def build(length: int) -> Any:
        return lambda states: stack(inputs_embeds=states, use_cache=False).last_hidden_state

    return AttentionCall(name, family, setting, around=around, build=build, modules=(stack,))
