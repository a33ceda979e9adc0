"""The functions that become ONNX graphs, their example inputs, and the names of their inputs and outputs.

Names are those of optimum, which other programs look for: `past_key_values.0.key`, `present.0.key`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.request import refuse_encoder_decoder
from hf_posenc.export.samples import random_ids
from hf_posenc.patching.call.cache_scheme import accept_cache
from hf_posenc.patching.call.caches import cache_argument, first_cache
from hf_posenc.patching.place.encoding import current_encoding

#: One pair of keys and values for each layer, `(batch, key_value_heads, past_length, width)` each.
Past = list[tuple[Tensor, Tensor]]

#: Sizes of the example. All differ, so that no length can stand for another.
_BATCH, _PAST, _LENGTH = 2, 7, 5


@dataclass(frozen=True)
class Graph:
    """A function to be exported.

    Args:
        module: the function.
        inputs: example inputs by name.
        shapes: for each input, the names of its open axes.
        past: the cache among the inputs, or `None`.
    """

    module: nn.Module
    inputs: dict[str, Any]
    shapes: dict[str, Any]
    past: Past | None = None

    @property
    def input_names(self) -> dict[str, str]:
        """Names of the inputs, by those that the exporter gives them: their paths."""
        plain = {name: name for name in self.inputs if name != "past"}
        paths = [f"past.{index}.{kind}" for index in range(len(self.past or [])) for kind in (0, 1)]
        return plain | dict(zip(paths, _names("past_key_values", self.past or []), strict=True))

    def output_names(self, found: list[str]) -> list[str]:
        """Names of the outputs, given those that the exporter derives from the dictionary."""
        plain = [name for name in found if not name.startswith("present")]
        return plain + _names("present", self.past or [])

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The names of the open axes of every input and of the cached outputs."""
        named = {name: axes for name, axes in self.shapes.items() if name != "past"}
        for prefix, length in (("past_key_values", "past_sequence_length"), ("present", "total_sequence_length")):
            named |= {key: {0: "batch_size", 2: length} for key in _names(prefix, self.past or [])}
        return named


class _Decoder(nn.Module):
    """Tokens after a cache: logits, and the cache after them. Positions are counted over the real tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # While it is traced, the modules of a model are not its own.
        self.arguments = _arguments(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Past) -> dict[str, Any]:
        output = run_decoder(self.model, input_ids, attention_mask, past, self.arguments)
        return {"logits": output.logits, "present": cached(output)}


class Plain(nn.Module):
    """A call without a cache: the tensors of its output."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of the output by name."""
        return run_plain(self.model, inputs)


def run_decoder(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    past: Past,
    arguments: tuple[str, bool] | None = None,
) -> Any:
    """Calls a decoder as `generate` does.

    Args:
        model: the decoder.
        input_ids: `(batch, length)`.
        attention_mask: `(batch, past_length + length)`, 1 at real tokens.
        past: the cache.
        arguments: the name of the argument of its cache, and whether the model is given positions, which a patched
            model counts over the mask itself; `None` to look.
    """
    cache = DynamicCache()
    for index, (key, value) in enumerate(past):
        cache.update(key, value, index)
    accept_cache(cache)
    name, takes_positions = _arguments(model) if arguments is None else arguments
    extra: dict[str, Any] = {name: cache}
    if takes_positions:
        counted = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        extra["position_ids"] = counted[:, -input_ids.shape[1] :]
    return model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True, return_dict=True, **extra)


def _arguments(model: PreTrainedModel) -> tuple[str, bool]:
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return cache_argument(model), current_encoding(model) is None and takes_positions


def run_plain(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Calls a model without a cache, and returns the tensors of its output."""
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    output = model(**inputs, return_dict=True, **extra)
    return {name: value for name, value in output.items() if isinstance(value, Tensor)}


def cached(output: Any) -> Past:
    """The keys and values of the cache in an output."""
    return [(layer.keys, layer.values) for layer in first_cache(output.values()).layers]


def graph_of(model: PreTrainedModel) -> Graph:
    """The graph of a model: with a cache if it generates, else without.

    Raises:
        UnsupportedError: for an encoder-decoder model, or one that caches something else than keys and values.
    """
    refuse_encoder_decoder(model)
    ids = random_ids(model, _PAST + _LENGTH, _BATCH)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    tokens = {0: "batch_size", 1: "sequence_length"}
    if not model.can_generate():
        inputs = plain_inputs(model, mask)
        return Graph(Plain(model), inputs, dict.fromkeys(inputs, tokens))
    with torch.no_grad():
        found = first_cache(run_decoder(model, ids[:, :_PAST], mask[:, :_PAST], []).values())
    layers = getattr(found, "layers", [])
    if not layers or any(type(layer) is not DynamicLayer or layer.keys is None for layer in layers):
        raise UnsupportedError(
            f"{type(model).__name__} caches something else than the keys and values of every layer, which has no "
            "common names in ONNX. Use model.save_pretrained."
        )
    past = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    given: dict[str, Any] = {"input_ids": ids[:, _PAST:], "attention_mask": mask, "past": past}
    cache_axes = {0: "batch_size", 2: "past_sequence_length"}
    shapes = {
        "input_ids": tokens,
        "attention_mask": {0: "batch_size", 1: "total_sequence_length"},
        "past": [(cache_axes, cache_axes)] * len(past),
    }
    return Graph(_Decoder(model), given, shapes, past)


def plain_inputs(model: PreTrainedModel, mask: Tensor) -> dict[str, Tensor]:
    """The inputs of a call without a cache, in the order of the programs: random tokens in two texts of a pair."""
    batch, length = mask.shape
    inputs = {"input_ids": random_ids(model, length, batch), "attention_mask": mask}
    takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
    if takes_types and getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = (torch.arange(length) // (length // 2 + 1)).expand_as(mask).contiguous()
    return inputs


def _names(prefix: str, past: Past) -> list[str]:
    return [f"{prefix}.{index}.{kind}" for index in range(len(past)) for kind in ("key", "value")]
