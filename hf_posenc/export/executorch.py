"""The target "executorch": a program for phones and other small devices, for one sequence, without a cache."""

from __future__ import annotations

import copy
import importlib.metadata
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError, UsageError
from hf_posenc.export.onnx.graphs import Plain, plain_inputs, run_plain
from hf_posenc.export.onnx.program import prepare_for_tracing, quiet
from hf_posenc.export.onnx.verify import compare_plain
from hf_posenc.export.onnx.write import save_configs
from hf_posenc.export.records import Check, Written, checked
from hf_posenc.export.request import Request, refuse_encoder_decoder
from hf_posenc.patching.place.config_entry import find_lengths
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.preserve import attention_implementation

#: Largest difference at which both count as equal, in float32; relative for outputs larger than 1. XNNPACK sums in
#: another order.
_TOLERANCE = 1e-4
#: Length of the example. It is none of the compared lengths.
_LENGTH = 11
#: The smallest `max_length`.
_LEAST = 16
_FILE = "model.pte"
#: Longest sequence by default. ExecuTorch plans memory for attention over all pairs of tokens.
_DEFAULT_LENGTH = 512


def write(request: Request, *, max_length: int | None = None) -> Written:
    """Writes `model.pte` in float32 for XNNPACK, ExecuTorch's backend for CPUs.

    The program takes one sequence of 1 to `max_length` tokens: `input_ids`, `attention_mask` and, if the model has
    them, `token_type_ids`, each `(1, length)` int64 and in this order. It has no cache. For a model that generates, it
    returns the logits of all tokens, and each new token costs a run over the whole text.

    Args:
        request: the model and where to write it.
        max_length: longest sequence, in tokens. ExecuTorch reserves memory for it. `None` for the length of the model,
            at most 512.

    Raises:
        UnsupportedError: for an encoder-decoder model, if the model cannot run `max_length` tokens or cannot be traced
            with an open length, or if ExecuTorch computes other numbers.
        UsageError: if `max_length` is not a whole number of at least 16, transformers is too old, or a dependency of
            ExecuTorch is missing.
    """
    refuse_encoder_decoder(request.model)
    longest = _default_length(request.model) if max_length is None else max_length
    if type(longest) is not int or longest < _LEAST:
        raise UsageError(f"max_length is {longest!r}; expected a whole number of tokens, at least {_LEAST}.")
    # The exporter freezes the weights and needs them on the CPU.
    reference = copy.deepcopy(request.model).float().cpu()
    outputs = _outputs(reference, longest)
    path = request.draft / _FILE
    _save_program(reference, path, longest)
    checks = compare(reference, path, longest)
    save_configs(request)
    carrier = f"its own ExecuTorch program for sequences of up to {longest} tokens, without a cache"
    return Written(carrier, checks, _usage(reference, longest, outputs))


def _save_program(model: PreTrainedModel, path: Path, max_length: int) -> None:
    """Writes a model as a program. The exporter freezes its weights."""
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
    with attention_implementation(model, "sdpa", unless=["eager"]), quiet():
        inputs = _example(model, _LENGTH)
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


def _example(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """The inputs of a program, in its order: one sequence of tokens, with padding in the last quarter."""
    return plain_inputs(model, _mask(length))


def _mask(length: int) -> Tensor:
    mask = torch.ones(1, length, dtype=torch.int64)
    mask[:, length - length // 4 :] = 0
    return mask


@torch.no_grad()
def compare(model: PreTrainedModel, path: Path, max_length: int) -> tuple[Check, ...]:
    """Loads a program and runs it and the model on the same tokens: one token, short sequences, the longest, with and
    without padding.

    Args:
        model: the model it was made from.
        path: the program.
        max_length: longest sequence of the program.

    Raises:
        UnsupportedError: if their outputs differ by more than `_TOLERANCE`, or ExecuTorch cannot run the program.
    """
    from executorch.runtime import Runtime

    runtime = f"executorch {importlib.metadata.version('executorch')}"
    try:
        program = Runtime.get().load_program(path)
        method = program.load_method("forward")
    except RuntimeError as error:
        raise UnsupportedError(f"{runtime} cannot load the program: {error}. Use to='onnx'.") from error

    def run(inputs: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
        try:
            outputs = method.execute(list(inputs.values()))
        except RuntimeError as error:
            length = inputs["input_ids"].shape[1]
            raise UnsupportedError(
                f"{runtime} cannot run the program on {length} tokens: {error}. Use to='onnx'."
            ) from error
        if len(outputs) != len(names):
            raise UnsupportedError(
                f"{runtime} returns {len(outputs)} outputs, the model {len(names)} ({', '.join(names)})."
            )
        return dict(zip(names, outputs, strict=True))

    lengths = [length for length in sorted({1, 7, 24, max_length // 2 + 1, max_length}) if length <= max_length]
    padded = [_mask(length) for length in lengths]
    found = compare_plain(model, [*padded, *map(torch.ones_like, padded)], run)
    other = "Use to='onnx', or model.save_pretrained with hf_posenc where it is loaded."
    return checked(runtime, found, _TOLERANCE, other)


def _default_length(model: PreTrainedModel) -> int:
    encoding = current_encoding(model)
    if encoding is not None and encoding.lengths is not None:
        known = [encoding.lengths.current, encoding.lengths.reach.length]
    else:
        known = list(find_lengths(model.config.get_text_config()).values())
    return min([length for length in known if length is not None] + [_DEFAULT_LENGTH])


@torch.no_grad()
def _outputs(model: PreTrainedModel, longest: int) -> list[str]:
    """The names of the outputs, from a run of the longest sequence."""
    try:
        return list(run_plain(model, _example(model, longest)))
    except (IndexError, RuntimeError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot run {longest} tokens, the longest sequence of the program: {error} Use a "
            "smaller max_length."
        ) from error


def _usage(model: PreTrainedModel, longest: int, outputs: list[str]) -> str:
    names = list(_example(model, _LEAST))
    text = (
        f"The inputs are {_listed(names)}, int64, `(1, length)` with up to {longest} tokens. The outputs are "
        f"{_listed(outputs)}. There is no cache"
    )
    if model.can_generate():
        text += ": each new token needs a run over the whole text"
    results = f"({outputs[0]},)" if len(outputs) == 1 else ", ".join(outputs)
    code = _CODE.replace("{names}", repr(names)).replace("{outputs}", results)
    return f"{text}.\n\n{code}"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_CODE = """```python
import torch
from executorch.runtime import Runtime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
program = Runtime.get().load_program("{folder}/model.pte")
method = program.load_method("forward")
batch = tokenizer("The dog chased another dog.", return_tensors="pt")
names = {names}
inputs = [batch[name] if name in batch else torch.zeros_like(batch["input_ids"]) for name in names]
{outputs} = method.execute(inputs)
```"""
