"""Code shared by the exports that write a model as a program of tensors for another runtime."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TextIO, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.export.carriers import Carrier, Export, Form
from hf_posenc.export.comparison import difference_at_real_tokens, random_ids
from hf_posenc.export.records import Check
from hf_posenc.patching.call.module_sites import EXPORTED_LENGTH
from hf_posenc.patching.call.runtime import StackForward
from hf_posenc.patching.forwards import forward_on_instance
from hf_posenc.patching.place.config_entry import detach_entry, find_lengths, write_lengths
from hf_posenc.preserve import attention_implementation, hidden, quiet
from hf_posenc.schemes.parts import QueryKeyMap

#: Runs a program without a cache: receives its inputs, and the names of the outputs of the model.
Run = Callable[[dict[str, Tensor], list[str]], dict[str, Tensor]]


class ProgramExport(Export[Form]):
    """An export that traces a model. Its program can have any scheme."""

    @property
    @abstractmethod
    def program(self) -> str:
        """What it writes, in a few words."""

    def carriers(self) -> Sequence[Carrier[Form]]:
        """The program of the model is the only one."""
        return [Carrier("its own program", lambda parts: Form(carrier=self.program))]

    @cached_property
    def reference(self) -> PreTrainedModel:
        """A copy in float32 on the CPU. Tracing freezes its weights, and may extend buffers."""
        return copy.deepcopy(self.model).float().cpu().eval()

    def save_configs(self) -> None:
        """Saves the configs without the scheme, which other programs could not read. The program contains it.

        The lengths are those of the program, not those of the stock model.
        """
        config = copy.deepcopy(self.model.config)
        lengths = find_lengths(config, [getattr(config, key, None) for key in config.sub_configs])
        detach_entry(config)
        write_lengths(config, lengths)
        config.save_pretrained(self.draft)
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(self.draft)


class Plain(nn.Module):
    """A call without a cache: the tensors of its output."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of the output by name."""
        return run_plain(self.model, inputs)


def run_plain(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Calls a model without a cache, and returns the tensors of its output."""
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    output = model(**inputs, return_dict=True, **extra)
    return {name: value for name, value in output.items() if isinstance(value, Tensor)}


def padded(length: int, *padding: int) -> Tensor:
    """`(batch, length)`, 1 at real tokens, after the given amount of padding in each row."""
    return (torch.arange(length) >= torch.tensor(padding or (0,)).unsqueeze(-1)).long()


def plain_inputs(model: PreTrainedModel, mask: Tensor) -> dict[str, Tensor]:
    """The inputs of a call without a cache, in the order of the programs: random tokens in two texts of a pair."""
    batch, length = mask.shape
    inputs = {"input_ids": random_ids(model, length, batch), "attention_mask": mask}
    takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
    if takes_types and getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = (torch.arange(length) // (length // 2 + 1)).expand_as(mask).contiguous()
    return inputs


def plain_checks(
    model: PreTrainedModel, masks: Iterable[Tensor], run: Run, runtime: str, allowed: float
) -> Iterator[Check]:
    """Compares a program without a cache, on tokens with some masks."""
    for mask in masks:
        inputs = plain_inputs(model, mask)
        try:
            expected = run_plain(model, inputs)
        except SequenceLengthError:
            continue
        for name, value in run(inputs, list(expected)).items():
            mode = "embedding" if name == "last_hidden_state" else "prefill"
            difference = difference_at_real_tokens(value, expected[name], mask)
            yield Check(runtime, mode, name.replace("_", " "), difference, allowed, f" of {mask.shape[1]} tokens")


@contextlib.contextmanager
def tracing(
    model: PreTrainedModel, program: str, telling: Sequence[str] = (), length: int = EXPORTED_LENGTH
) -> Iterator[None]:
    """Context manager for tracing: hides notes, uses attention that can be traced, and converts errors of the exporter.

    Args:
        model: a copy of the model. Its weights become constants, and no buffer limits its length, except a mask.
        program: the kind of program, for messages.
        telling: beginnings of the most informative sentences, which the exporter may hide among others.
        length: up to which the index buffers of patched stacks are extended.

    Raises:
        UnsupportedError: with the reason.
    """
    for module in model.modules():
        if isinstance(module, QueryKeyMap):
            module.fix_weights()
        forward = forward_on_instance(module)
        if isinstance(forward, StackForward):
            forward.runtime.slots.reach(module, length, masks=False)
    with attention_implementation(model, "sdpa", unless=["eager"]), quiet():
        try:
            # The exporters report their progress there.
            with contextlib.redirect_stdout(cast(TextIO, _OtherThreads(sys.stdout))):
                yield
        except UnsupportedError:
            raise
        except Exception as error:
            causes: list[BaseException] = [error]
            while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
                causes.append(cause)
            lines = [line.strip() for cause in causes for line in str(cause).splitlines()] or [repr(error)]
            marked = (line[line.index(mark) :] for mark in telling for line in lines if mark in line)
            reason = next(marked, lines[0]).rstrip(".")
            raise UnsupportedError(f"{type(model).__name__} cannot be written as {program}: {reason}") from error


class _OtherThreads:
    """A stream without what is written while messages are hidden."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or drops what the thread that hides messages writes."""
        return len(text) if hidden.get() else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
