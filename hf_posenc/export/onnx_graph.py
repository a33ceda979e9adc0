"""The graph of a model in ONNX: the function that is exported, and the names of its tensors.

The names are the same as in optimum, because other programs look for them: `past_key_values.0.key`, `present.0.key`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_posenc.errors import UnsupportedError, UsageError
from hf_posenc.export.comparison import random_ids
from hf_posenc.export.programs import Plain, plain_inputs, tracing
from hf_posenc.patching.call.cache import cache_argument, first_cache
from hf_posenc.patching.call.cache_checks import accept_cache
from hf_posenc.patching.place.encoding import current_encoding

#: One pair of keys and values for each layer, `(batch, key_value_heads, past_length, width)` each.
Past = list[tuple[Tensor, Tensor]]
#: Sizes of the example. All differ, so that no length can be mistaken for another.
_BATCH, _PAST, _LENGTH = 2, 7, 5
#: The tensors of a cached layer, and the lengths that are not that of the new tokens.
_CACHED = ("key", "value")
_LENGTHS = {
    "attention_mask": "total_sequence_length",
    "past": "past_sequence_length",
    "present": "total_sequence_length",
}
#: Beginnings of the most informative sentences in errors of the exporter.
_TELLING = ("No ONNX function found", "specialized it to be a constant", "Error when translating node")


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


def function_of(model: PreTrainedModel) -> tuple[nn.Module, dict[str, Any]]:
    """The function that becomes the graph of a model, with a cache if it generates, and example inputs by name.

    Raises:
        UnsupportedError: for a model that caches something other than keys and values.
    """
    ids = random_ids(model, _PAST + _LENGTH, _BATCH)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    if not model.can_generate():
        return Plain(model), plain_inputs(model, mask)
    with torch.no_grad():
        cache = first_cache(run_decoder(model, ids[:, :_PAST], mask[:, :_PAST], []).values())
    layers = getattr(cache, "layers", [])
    if not layers or any(type(layer) is not DynamicLayer or layer.keys is None for layer in layers):
        raise UnsupportedError(
            f"{type(model).__name__} caches something other than the keys and values of every layer, which has no "
            "common names in ONNX."
        )
    past = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    return _Decoder(model), {"input_ids": ids[:, _PAST:], "attention_mask": mask, "past": past}


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
    with tracing(model, "an ONNX graph with open lengths", _TELLING):
        function, inputs = function_of(model)
        shapes = {name: _open(value) for name, value in inputs.items()}
        config = OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=opset_version)
        exported = OnnxExporter().export(function, inputs, config=config)
    written = exported.program.opset_imports[""]
    if opset_version not in (None, written):
        # The exporter tries to convert the graph, and returns the unconverted one if it cannot.
        raise UnsupportedError(
            f"The graph of this {type(model).__name__} cannot be written with opset_version={opset_version}; the "
            f"exporter wrote version {written}. Use opset_version={written}, or leave it out."
        )
    _name(exported.program.graph, _LENGTHS if model.can_generate() else {})
    return exported.program


def _open(value: Any) -> Any:
    """The axes of batch and length, as torch.export takes them. It raises an error if the code fixes one of them."""
    if isinstance(value, Tensor):
        return dict.fromkeys((0, value.ndim // 2), torch.export.Dim.DYNAMIC)
    return type(value)(map(_open, value))


def _name(graph: Any, lengths: dict[str, str]) -> None:
    """Names inputs, outputs and open axes.

    Args:
        graph: whose inputs and outputs have the paths of the example as names.
        lengths: the names of lengths that are not that of the tokens.
    """
    import onnx_ir

    for value in (*graph.inputs, *graph.outputs):
        kind, *path = value.name.removeprefix("input.").split(".")
        name = "past_key_values" if kind == "past" else kind
        value.name = f"{name}.{path[0]}.{_CACHED[int(path[1])]}" if path else name
        named = {0: "batch_size", 2 if path else 1: lengths.get(kind, "sequence_length")}
        value.shape = onnx_ir.Shape(
            [size if isinstance(size, int) else named.get(axis, str(size)) for axis, size in enumerate(value.shape)]
        )
    # Shapes in between contain the exporter's own names.
    for node in graph:
        for value in node.outputs:
            if value not in graph.outputs:
                value.shape = None
