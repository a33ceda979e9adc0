"""Words: the caller passes them one by one."""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

from hf_posenc.patching.anatomy.architectures.example_inputs import numbers
from hf_posenc.patching.anatomy.discovery import WIDTHS, first_int
from hf_posenc.patching.anatomy.forward_code import forward_parameters
from hf_posenc.patching.anatomy.short_runs import NotRunnableError
from hf_posenc.patching.layouts.layout import Layout

#: The first word of a short text: vocabularies often begin with tokens of another meaning. No text needs so many words.
_FIRST_WORD, _LAST_WORD = 5, 64
#: The projection of keys in cross-attention.
_CROSS_KEYS = re.compile(
    r"(cross_attn|cross_attention|encoder_attn|encoder_attention)\.k_proj$|crossattention\.(attention|self)\.key$"
)
#: Arguments with vectors in place of tokens.
_EMBEDDINGS = ("inputs_embeds", "query_embeds", "hidden_states")


class Text(Layout):
    """Words, or embeddings in their place. Every stack is taken for one of text that is of no other kind."""

    takes_tokens = True

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        """Any stack."""
        return True

    @classmethod
    def example(cls, module: PreTrainedModel, length: int, constant: bool) -> dict[str, Any]:
        """A few words."""
        parameters = forward_parameters(type(module))
        if "input_ids" in parameters:
            return cls._words(module, length)
        embedded = next((name for name in _EMBEDDINGS if name in parameters), None)
        if embedded is None:
            raise NotRunnableError(
                f"{type(module).__name__} does not take token ids, so it cannot be run to find out how it uses "
                f"positions (its arguments: {', '.join(list(parameters)[1:8])})."
            )
        return {embedded: _embeddings(module, length)} | _encoded(module, length)

    @classmethod
    def _words(cls, module: PreTrainedModel, length: int) -> dict[str, Any]:
        parameters = forward_parameters(type(module))
        tokens = _token_ids(module, length)
        # One question with one choice, which is a text, where a model reads `(batch, choices, length)`.
        known = MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()
        chooses = any(kind.__name__ in known for kind in type(module).__mro__)
        given: dict[str, Any] = {"input_ids": tokens.unsqueeze(1) if chooses else tokens}
        if "use_cache" in parameters:
            given["use_cache"] = False
        given |= _encoded(module, length)
        if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            given["decoder_input_ids"] = tokens
        return given


def _token_ids(module: PreTrainedModel, length: int) -> Tensor:
    """`(1, length)`: a text of words that the vocabularies have, with an end where the config states one."""
    config = module.config.get_text_config()
    stated = [getattr(config, name, None) for name in ("vocab_size", "decoder_vocab_size")]
    count = min([size for size in stated if isinstance(size, int)] or [_LAST_WORD])
    special = {name: value for name, value in config.to_dict().items() if name.endswith("_token_id")}
    reserved = {one for value in special.values() for one in (value if isinstance(value, list) else [value])}
    words = [*range(_FIRST_WORD, min(count, _LAST_WORD)), *range(min(count, _FIRST_WORD))]
    words = [word for word in words if word not in reserved] or words
    ids = list(itertools.islice(itertools.cycle(words), length))
    end = special.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if isinstance(end, int) and 0 <= end < count:
        ids[-1] = end
    return torch.tensor([ids])


def _embeddings(model: PreTrainedModel, length: int, width: int | None = None) -> Tensor:
    """`(1, length, hidden)` in place of the embeddings of a stack, or of another width."""
    return numbers(1, length, first_int(model.config, WIDTHS) if width is None else width)


def _encoded(module: PreTrainedModel, length: int) -> dict[str, Any]:
    """The output of an encoder, for a module that attends to it."""
    name = "encoder_hidden_states"
    width = _cross_attention_width(module) if name in forward_parameters(type(module)) else None
    return {} if width is None else {name: _embeddings(module, length, width)}


def _cross_attention_width(model: PreTrainedModel) -> int | None:
    """Width of the encoder's output that a decoder reads; `None` if it has no cross-attention."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and _CROSS_KEYS.search(path):
            return module.in_features
    return None
