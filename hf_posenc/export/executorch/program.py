"""Turns a model into an ExecuTorch program with transformers' exporter, and compares the program with the model."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError, UsageError
from hf_posenc.export.onnx.graphs import Plain, run_plain, takes_token_types
from hf_posenc.export.onnx.program import prepare_for_tracing, quiet, traceable_attention
from hf_posenc.export.records import Check
from hf_posenc.export.samples import difference_at_real_tokens, random_ids

#: Largest difference at which both count as equal, in float32; relative for outputs larger than 1. XNNPACK sums in
#: another order.
TOLERANCE = 1e-4
#: Length of the example. It is none of the compared lengths.
_LENGTH = 11
#: The smallest `max_length`.
LEAST = 16


def save_program(model: PreTrainedModel, path: Path, max_length: int) -> None:
    """Writes a model as a program for sequences of up to `max_length` tokens.

    Args:
        model: a float32 model on the CPU in evaluation mode. The exporter freezes its weights.
        path: the file.
        max_length: longest sequence, at least `LEAST` tokens.

    Raises:
        UnsupportedError: if it cannot be traced with an open length, or ExecuTorch lacks an operator.
        UsageError: if transformers is too old, or a dependency of ExecuTorch is missing.
    """
    try:
        from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter
    except ImportError as error:
        raise UsageError(
            f"The exporter to ExecuTorch of transformers {transformers.__version__} cannot be imported ({error}). It "
            "needs ExecuTorch with all of its dependencies, and its compiler needs transformers 5.23 or newer: "
            "pip install executorch 'transformers>=5.23'"
        ) from error
    prepare_for_tracing(model, max_length)
    length = torch.export.Dim("length", min=2, max=max_length)
    with traceable_attention(model), quiet():
        inputs = example(model, _LENGTH)
        shapes = {name: {1: length} for name in inputs}
        config = ExecutorchConfig(dynamic=True, dynamic_shapes=shapes)
        try:
            exported = ExecutorchExporter().export(Plain(model), dict(inputs), config=config)
        except UnsupportedError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [repr(error)]
            raise UnsupportedError(
                f"{type(model).__name__} cannot be written as an ExecuTorch program of up to {max_length} tokens: "
                f"{lines[0].rstrip('.')}. Use to='onnx', or model.save_pretrained with hf_posenc where it is loaded."
            ) from error
        with path.open("wb") as file:
            exported.program.write_to_file(file)


def example(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """The inputs of a program, in its order: one sequence of tokens, with padding in the last quarter.

    Args:
        model: the model.
        length: number of tokens, with padding.
    """
    ids = random_ids(model, length)
    mask = torch.ones_like(ids)
    mask[:, length - length // 4 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if takes_token_types(model):
        inputs["token_type_ids"] = (torch.arange(length) // (length // 2 + 1)).expand_as(ids).contiguous()
    return inputs


@torch.no_grad()
def compare(model: PreTrainedModel, path: Path, max_length: int) -> tuple[Check, ...]:
    """Loads a program and runs it and the model on the same tokens: one token, short sequences, the longest, with and
    without padding.

    Args:
        model: the model it was made from.
        path: the program.
        max_length: longest sequence of the program.

    Raises:
        UnsupportedError: if their outputs differ by more than `TOLERANCE`, or ExecuTorch cannot run the program.
    """
    from executorch.runtime import Runtime

    runtime = f"executorch {importlib.metadata.version('executorch')}"
    try:
        program = Runtime.get().load_program(path)
        method = program.load_method("forward")
    except RuntimeError as error:
        raise UnsupportedError(f"{runtime} cannot load the program: {error}. Use to='onnx'.") from error
    found: dict[str, list[float]] = {}
    for length in sorted({1, 7, 24, max_length // 2 + 1, max_length}):
        if length > max_length:
            continue
        padded = example(model, length)
        for inputs in (padded, padded | {"attention_mask": torch.ones_like(padded["attention_mask"])}):
            expected = run_plain(model, inputs)
            outputs = _run(method, runtime, inputs)
            if len(outputs) != len(expected):
                raise UnsupportedError(
                    f"{runtime} returns {len(outputs)} outputs, the model {len(expected)} ({', '.join(expected)})."
                )
            for (name, wanted), output in zip(expected.items(), outputs, strict=True):
                found.setdefault(name, []).append(difference_at_real_tokens(output, wanted, inputs["attention_mask"]))
    checks = tuple(
        Check(
            runtime,
            "embedding" if name == "last_hidden_state" else "prefill",
            name.replace("_", " "),
            float(torch.tensor(differences).max()),  # NaN if there is one
            TOLERANCE,
        )
        for name, differences in found.items()
    )
    wrong = [check for check in checks if not check.difference <= TOLERANCE]
    if wrong:
        raise UnsupportedError(
            f"{runtime} computes other {wrong[0].quantity}: they differ by {wrong[0].difference:.3g} (allowed: "
            f"{TOLERANCE}). Use to='onnx', or model.save_pretrained with hf_posenc where it is loaded."
        )
    return checks


def _run(method: Any, runtime: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    try:
        outputs: list[Tensor] = list(method.execute(list(inputs.values())))
    except RuntimeError as error:
        length = inputs["input_ids"].shape[1]
        raise UnsupportedError(
            f"{runtime} cannot run the program on {length} tokens: {error}. Use to='onnx'."
        ) from error
    return outputs
