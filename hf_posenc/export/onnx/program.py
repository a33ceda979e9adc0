"""Turns a function into an ONNX file with transformers' exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError, UsageError
from hf_posenc.export.onnx.graphs import Graph, graph_of
from hf_posenc.patching.call.runtime import StackForward
from hf_posenc.patching.call.slot_buffers import EXPORTED_LENGTH
from hf_posenc.preserve import attention_implementation
from hf_posenc.schemes.parts import QueryKeyMap

#: Protobuf limits a file to 2 GB. Larger weights go to a file of their own.
LARGEST_FILE = int(1.5 * 2**30)
_WEIGHTS = "model.onnx_data"


def export_program(model: PreTrainedModel, opset_version: int | None) -> Any:
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
    with attention_implementation(model, "sdpa", unless=["eager"]), quiet():
        graph = graph_of(model)
        shapes = {name: _open(axes) for name, axes in graph.shapes.items()}
        config = OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=opset_version)
        try:
            exported = OnnxExporter().export(graph.module, dict(graph.inputs), config=config)
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(_reason(model, error)) from error
    written = exported.program.opset_imports[""]
    if opset_version not in (None, written):
        # The exporter tries to convert the graph, and returns the unconverted one if it cannot.
        raise UnsupportedError(
            f"The graph of this {type(model).__name__} cannot be written with opset_version={opset_version}; the "
            f"exporter wrote version {written}. Use opset_version={written}, or leave it out."
        )
    _name(exported.program.graph, graph)
    return exported.program


def save_program(program: Any, path: Path) -> None:
    """Writes a graph to `path`, with its weights inside if they fit."""
    import onnx_ir

    tensors = (value.const_value for value in program.graph.initializers.values())
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    onnx_ir.save(program, str(path), external_data=_WEIGHTS if size > LARGEST_FILE else None)


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


def _reason(model: PreTrainedModel, error: Exception) -> str:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    lines = [line.strip() for one in causes for line in str(one).splitlines()]
    known = ("No ONNX function found", "specialized it to be a constant")
    marked = (line[line.index(mark) :] for mark in known for line in lines if mark in line)
    found = next(marked, lines[0] if lines else repr(error)).rstrip(".")
    return (
        f"{type(model).__name__} cannot be written as an ONNX graph with open lengths: {found}. Use "
        "model.save_pretrained, and `import hf_posenc` where the checkpoint is loaded."
    )


def prepare_for_tracing(model: PreTrainedModel, length: int = EXPORTED_LENGTH) -> None:
    """Prepares a copy of a model. Its weights become constants, and no length is limited by a buffer, except a mask.

    Args:
        model: the copy.
        length: up to which the index buffers of patched stacks are extended.
    """
    for module in model.modules():
        if isinstance(module, QueryKeyMap):
            module.fix_weights()
        forward = module.__dict__.get("forward")
        if isinstance(forward, StackForward):
            forward.runtime.slots.reach(module, length, masks=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides the progress reports and the notes of exporters, which concern operators that are not used here.

    onnxruntime's quantizer also changes what the root logger shows. It is as before afterwards.
    """
    loggers = [
        logging.getLogger(name)
        for name in ("torch.onnx", "transformers", "onnxscript", "onnx_ir", "onnxruntime.quantization")
    ]
    root = logging.getLogger()
    shown, handlers = root.level, list(root.handlers)
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
        root.setLevel(shown)
        root.handlers[:] = handlers
