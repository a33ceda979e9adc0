"""The target "executorch": a program for phones and other small devices, for one sequence, without a cache."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError, UsageError
from hf_posenc.export.carriers import Form
from hf_posenc.export.layers import ModelParts
from hf_posenc.export.programs import (
    Plain,
    ProgramExport,
    padded,
    plain_checks,
    plain_inputs,
    run_plain,
    tracing,
)
from hf_posenc.export.records import Check
from hf_posenc.patching.place.config_entry import find_lengths

#: Largest difference at which program and model count as equal, in float32; relative for outputs larger than 1.
#: XNNPACK sums in another order.
_TOLERANCE = 1e-4
#: Length of the example, which differs from all compared lengths.
_LENGTH = 11
#: The smallest `max_length`.
_LEAST = 16
_FILE = "model.pte"
#: Longest sequence by default. ExecuTorch plans memory for attention over all pairs of tokens.
_DEFAULT_LENGTH = 512


@dataclass
class ExecutorchExport(ProgramExport):
    """Writes `model.pte` in float32 for XNNPACK, ExecuTorch's backend for CPUs.

    The program takes one sequence of 1 to `max_length` tokens: `input_ids`, `attention_mask` and, if the model has
    them, `token_type_ids`, each `(1, length)` int64 and in this order. It has no cache. For a model that generates, it
    returns the logits of all tokens, and each new token costs a run over the whole text.

    Args:
        max_length: longest sequence, in tokens. ExecuTorch reserves memory for it. `None` for the length of the model,
            at most 512.

    Raises:
        UsageError: while it is exported, if `max_length` is not a whole number of at least 16.
    """

    max_length: int | None = None

    @cached_property
    def longest(self) -> int:
        """The longest sequence."""
        longest = _default_length(self.parts) if self.max_length is None else self.max_length
        if type(longest) is not int or longest < _LEAST:
            raise UsageError(f"max_length is {longest!r}; expected a whole number of tokens, at least {_LEAST}.")
        return longest

    def prepare(self) -> None:
        """Runs the longest sequence.

        Raises:
            UnsupportedError: if the model cannot.
        """
        try:
            self.outputs = list(run_plain(self.reference, _example(self.reference, self.longest)))
        except (IndexError, RuntimeError) as error:
            raise UnsupportedError(
                f"{self.parts.name} cannot run {self.longest} tokens, the longest sequence of the program: {error} Use "
                "a smaller max_length."
            ) from error

    @property
    def program(self) -> str:
        """The program, with its longest sequence."""
        return f"its own ExecuTorch program for sequences of up to {self.longest} tokens, without a cache"

    def write(self, form: Form) -> None:
        """Writes the program.

        Raises:
            UnsupportedError: if the model cannot be traced with an open length.
            UsageError: if transformers is too old, or a dependency of ExecuTorch is missing.
        """
        try:
            from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter
        except ImportError as error:
            raise UsageError(
                f"The exporter to ExecuTorch of transformers {transformers.__version__} cannot be imported ({error}). "
                "It needs ExecuTorch with all of its dependencies, and its compiler needs transformers 5.23 or newer: "
                "pip install executorch 'transformers>=5.23'"
            ) from error
        length = torch.export.Dim("length", min=2, max=self.longest)
        with tracing(self.reference, f"an ExecuTorch program of up to {self.longest} tokens", length=self.longest):
            inputs = _example(self.reference, _LENGTH)
            config = ExecutorchConfig(dynamic=True, dynamic_shapes={name: {1: length} for name in inputs})
            exported = ExecutorchExporter().export(Plain(self.reference), dict(inputs), config=config)
        with (self.draft / _FILE).open("wb") as file:
            exported.program.write_to_file(file)
        self.save_configs()

    def checks(self, form: Form) -> Iterator[Check]:
        """Compares one token, short sequences, and the longest, with and without padding.

        Raises:
            UnsupportedError: if ExecuTorch cannot run the program.
        """
        from executorch.runtime import Runtime

        runtime = f"executorch {importlib.metadata.version('executorch')}"
        try:
            program = Runtime.get().load_program(self.draft / _FILE)
            method = program.load_method("forward")
        except RuntimeError as error:
            raise UnsupportedError(f"{runtime} cannot load the program: {error}") from error

        def run(inputs: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
            try:
                outputs = method.execute(list(inputs.values()))
            except RuntimeError as error:
                length = inputs["input_ids"].shape[1]
                raise UnsupportedError(f"{runtime} cannot run the program on {length} tokens: {error}") from error
            if len(outputs) != len(names):
                raise UnsupportedError(
                    f"{runtime} returns {len(outputs)} outputs, the model {len(names)} ({', '.join(names)})."
                )
            return dict(zip(names, outputs, strict=True))

        lengths = sorted(length for length in {1, 7, 24, self.longest // 2 + 1, self.longest} if length <= self.longest)
        masks = [padded(length, length // 4).flip(-1) for length in lengths] + [padded(length) for length in lengths]
        yield from plain_checks(self.reference, masks, run, runtime, _TOLERANCE)

    def usage(self, form: Form) -> str:
        """The names of inputs and outputs, and how to run it in Python."""
        names = list(_example(self.reference, _LEAST))
        text = (
            f"The inputs are {_listed(names)}, int64, `(1, length)` with up to {self.longest} tokens. The outputs are "
            f"{_listed(self.outputs)}. There is no cache"
        )
        if self.model.can_generate():
            text += ": each new token needs a run over the whole text"
        results = f"({self.outputs[0]},)" if len(self.outputs) == 1 else ", ".join(self.outputs)
        code = _CODE.replace("{names}", repr(names)).replace("{outputs}", results)
        return f"{text}.\n\n{code}"


def _example(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """The inputs of a program, in its order: one sequence of tokens, with padding in the last quarter."""
    return plain_inputs(model, padded(length, length // 4).flip(-1))


def _default_length(parts: ModelParts) -> int:
    if parts.placed is not None and parts.placed.lengths is not None:
        known = [parts.placed.lengths.current, parts.placed.lengths.reach.length]
    else:
        known = list(find_lengths(parts.model.config.get_text_config()).values())
    return min([length for length in known if length is not None] + [_DEFAULT_LENGTH])


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
