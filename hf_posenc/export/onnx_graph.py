"""The graph of a model in ONNX: the function that is exported, its example inputs, and the names of its tensors.

Names are those of optimum, which other programs look for: `past_key_values.0.key`, `present.0.key`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_posenc.errors import UnsupportedError, UsageError
from hf_posenc.export.comparison import random_ids
from hf_posenc.export.programs import Plain, plain_inputs, prepare_for_tracing, tracing
from hf_posenc.patching.call.cache_scheme import accept_cache
from hf_posenc.patching.call.caches import cache_argument, first_cache
from hf_posenc.patching.place.encoding import current_encoding

#: One pair of keys and values for each layer, `(batch, key_value_heads, past_length, width)` each.
Past = list[tuple[Tensor, Tensor]]
#: Sizes of the example. All differ, so that no length can stand for another.
_BATCH, _PAST, _LENGTH = 2, 7, 5
#: What an error of the exporter tells, where it does.
_TELLING = ("No ONNX function found", "specialized it to be a constant")


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


def cached(output: Any) -> Past:
    """The keys and values of the cache in an output."""
    return [(layer.keys, layer.values) for layer in first_cache(output.values()).layers]


def graph_of(model: PreTrainedModel) -> Graph:
    """The graph of a model: with a cache if it generates, else without.

    Raises:
        UnsupportedError: for a model that caches something else than keys and values.
    """
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
            "common names in ONNX."
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


def _names(prefix: str, past: Past) -> list[str]:
    return [f"{prefix}.{index}.{kind}" for index in range(len(past)) for kind in ("key", "value")]


def export_graph(model: PreTrainedModel, opset_version: int | None) -> Any:
    """Returns the graph of a model as an `onnx_ir.Model`.

    Args:
        model: a float32 model in evaluation mode.
        opset_version: version of the ONNX operators; `None` for the newest that the exporter writes.

    Raises:
        UnsupportedError: if it cannot be traced with open lengths, has an operator that ONNX lacks, or cannot be
            written with this version of the operators.
        UsageError: if transformers is too old.
    """
    try:
        from transformers.exporters import ExportedModel  # noqa: F401 (older exporters return other programs)
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    except ImportError as error:
        raise UsageError(
            f"The export to 'onnx' needs newer exporters than those of transformers {transformers.__version__}: "
            "pip install 'transformers>=5.23'"
        ) from error
    prepare_for_tracing(model)
    with tracing(model, "an ONNX graph with open lengths", _TELLING):
        graph = graph_of(model)
        shapes = {name: _open(axes) for name, axes in graph.shapes.items()}
        config = OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=opset_version)
        exported = OnnxExporter().export(graph.module, dict(graph.inputs), config=config)
    written = exported.program.opset_imports[""]
    if opset_version not in (None, written):
        # The exporter tries to convert the graph, and returns the unconverted one if it cannot.
        raise UnsupportedError(
            f"The graph of this {type(model).__name__} cannot be written with opset_version={opset_version}; the "
            f"exporter wrote version {written}. Use opset_version={written}, or leave it out."
        )
    _name(exported.program.graph, graph)
    return exported.program


def _open(axes: Any) -> Any:
    """The same axes as torch.export takes them. It raises an error if the code fixes one of them."""
    if isinstance(axes, dict):
        return dict.fromkeys(axes, torch.export.Dim.DYNAMIC)
    return type(axes)(map(_open, axes))


def _name(graph: Any, source: Graph) -> None:
    """Names inputs, outputs and open axes."""
    import onnx_ir

    for value in graph.inputs:
        value.name = source.input_names[value.name.removeprefix("input.")]
    outputs = source.output_names([value.name for value in graph.outputs])
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    for value in (*graph.inputs, *graph.outputs):
        named = source.axes.get(value.name, {0: "batch_size", 1: "sequence_length"})
        value.shape = onnx_ir.Shape(
            [size if isinstance(size, int) else named.get(axis, str(size)) for axis, size in enumerate(value.shape)]
        )
    # Shapes in between contain the exporter's own names.
    for node in graph:
        for value in node.outputs:
            if value not in graph.outputs:
                value.shape = None
