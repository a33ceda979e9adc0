"""Compares an ONNX file in onnxruntime with the model it was made from, at lengths that were not used in tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.export.onnx.graphs import Past, cached, plain_inputs, run_decoder, run_plain
from hf_posenc.export.records import Check, checked
from hf_posenc.export.samples import difference_at_real_tokens, random_ids, spans
from hf_posenc.patching.place.encoding import current_encoding

#: Largest difference at which both count as equal, in float32; relative for outputs larger than 1. Both sum in another
#: order: the 30 layers of SmolLM2 differ by 4e-6 in short texts, and by 1.3e-5 at position 16,384.
TOLERANCE = 5e-5
#: Tokens of one comparison after a long cache.
_TAIL = 32
#: Tokens of the text whose cache is repeated for comparisons after a longer one.
_SAMPLE = 256
#: Longer sequences are not compared.
_FARTHEST = 2**14
#: Runs a program without a cache: receives its inputs, and the names of the outputs of the model.
Program = Callable[[dict[str, Tensor], list[str]], dict[str, Tensor]]


@dataclass(frozen=True)
class Call:
    """A call in which both are compared.

    Args:
        past: number of cached tokens.
        length: number of new tokens.
        padding: for each row, the number of padding tokens at its start.
    """

    past: int
    length: int
    padding: tuple[int, ...] = (0,)

    def mask(self, first: int = 0) -> Tensor:
        """`(batch, past + length)`, 1 at real tokens."""
        slots = torch.arange(first, self.past + self.length)
        return (slots >= torch.tensor(self.padding).unsqueeze(-1)).long()


class Session:
    """An ONNX file in onnxruntime.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self.runtime = f"onnxruntime {onnxruntime.__version__}"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise UnsupportedError(f"{self.runtime} cannot load the graph: {error}") from error
        self.inputs = {one.name: one.shape for one in self.session.get_inputs()}
        self.outputs = [one.name for one in self.session.get_outputs()]

    def __call__(self, tensors: dict[str, Tensor], past: Past) -> dict[str, Tensor]:
        """Runs it. Inputs that the graph does not read are left out."""
        names = ("key", "value")
        given = tensors | {
            f"past_key_values.{index}.{name}": tensor
            for index, pair in enumerate(past)
            for name, tensor in zip(names, pair, strict=True)
        }
        feed = {name: np.ascontiguousarray(given[name].numpy()) for name in self.inputs}
        try:
            found = self.session.run(None, feed)
        except Exception as error:
            shapes = {name: value.shape for name, value in feed.items() if name in tensors}
            raise UnsupportedError(f"{self.runtime} cannot run the graph on {shapes}: {error}") from error
        return dict(zip(self.outputs, map(torch.from_numpy, found), strict=True))


@torch.no_grad()
def compare(model: PreTrainedModel, path: Path, allowed: float | None) -> tuple[Check, ...]:
    """Runs both on the same tokens: several lengths, several rows, padding on the left, and positions beyond a sliding
    window or the original length of a scaling; with a cache also token by token.

    Args:
        model: a float32 model in evaluation mode.
        path: the ONNX file.
        allowed: largest accepted difference; `None` if any is.

    Raises:
        UnsupportedError: if they differ by more, or if onnxruntime cannot run the file.
    """
    session = Session(path)
    if model.can_generate():
        found = _decoder(model, session)
    else:
        calls = [(3, (0,)), (24, (0, 5, 11)), *((stop, (0,)) for stop in _ends(model))]
        # Encoders are padded on the right.
        masks = [Call(0, length, padding).mask().flip(-1) for length, padding in calls]
        found = compare_plain(model, masks, lambda inputs, _: session(inputs, []))
    other = "Use model.save_pretrained, and `import hf_posenc` where the checkpoint is loaded."
    return checked(session.runtime, found, allowed, other)


def compare_plain(model: PreTrainedModel, masks: Iterable[Tensor], run: Program) -> Iterator[tuple[str, str, float]]:
    """The largest difference of each output without a cache, with its mode and name, on tokens with some masks."""
    found: dict[str, float] = {}
    for mask in masks:
        inputs = plain_inputs(model, mask)
        try:
            expected = run_plain(model, inputs)
        except SequenceLengthError:
            continue
        for name, value in run(inputs, list(expected)).items():
            difference = difference_at_real_tokens(value, expected[name], mask)
            found[name] = max(found.get(name, 0.0), difference, key=_nan_last)
    for name, difference in found.items():
        yield ("embedding" if name == "last_hidden_state" else "prefill", name.replace("_", " "), difference)


def _decoder(model: PreTrainedModel, session: Session) -> Iterator[tuple[str, str, float]]:
    prefills = [Call(0, 1), Call(0, 40), Call(0, 24, (0, 5, 11))]
    after = [Call(33, 1, (0, 4)), Call(33, 6, (0, 4))]
    after += [Call(max(0, stop - _TAIL), min(stop, _TAIL)) for stop in _ends(model)]
    yield "prefill", "logits", _largest(model, session, prefills)
    yield "decode", "logits", max(_largest(model, session, after), _step_by_step(model, session), key=_nan_last)


def _ends(model: PreTrainedModel) -> list[int]:
    """Lengths to compare at: those of every target, and beyond the native length if the scheme reaches further."""
    found = {stop for _, stop in spans(model)}
    lengths = None if (encoding := current_encoding(model)) is None else encoding.lengths
    if lengths is not None and lengths.native is not None:
        beyond = lengths.native + 16
        if beyond <= min(lengths.reach.length or _FARTHEST, _FARTHEST):
            found.add(beyond)
    return sorted(found)


def _largest(model: PreTrainedModel, session: Session, calls: list[Call]) -> float:
    """The largest difference of single calls.

    Cached tokens are those of a short text, repeated to the length of the cache. Random numbers would not have the size
    of real keys, and would hide differences in the new tokens or exaggerate them.
    """
    found, sample = [], _sample_cache(model)
    for call in calls:
        rows = len(call.padding)
        past: Past = [(_of_size(key, rows, call.past), _of_size(value, rows, call.past)) for key, value in sample]
        ids, mask = random_ids(model, call.length, rows), call.mask()
        try:
            expected = run_decoder(model, ids, mask, past).logits
        except SequenceLengthError:
            continue
        logits = session({"input_ids": ids, "attention_mask": mask}, past)["logits"]
        found.append(difference_at_real_tokens(logits, expected, mask[:, call.past :]))
    return max(found, key=_nan_last)


def _sample_cache(model: PreTrainedModel) -> Past:
    length = _SAMPLE
    while True:
        ids = random_ids(model, length)
        try:
            return cached(run_decoder(model, ids, torch.ones_like(ids), []))
        except SequenceLengthError:
            length //= 2


def _of_size(tensor: Tensor, rows: int, length: int) -> Tensor:
    repeats = -(-length // tensor.shape[2]) or 1
    return tensor.repeat(rows, 1, repeats, 1)[:, :, :length].contiguous()


def _step_by_step(model: PreTrainedModel, session: Session) -> float:
    """The largest difference over a prompt and the tokens after it, each with its own cache of the steps before."""
    prompt, steps, padding = 9, 6, (0, 3)
    ids = random_ids(model, prompt + steps, len(padding))
    mask = Call(0, prompt + steps, padding).mask()
    expected = run_decoder(model, ids, mask, []).logits
    past: Past = [
        (_of_size(key, len(padding), 0), _of_size(value, len(padding), 0)) for key, value in _sample_cache(model)
    ]
    logits, start = [], 0
    for stop in range(prompt, prompt + steps + 1):
        output = session({"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}, past)
        logits.append(output["logits"])
        present = [value for name, value in output.items() if name.startswith("present")]
        past, start = list(zip(present[::2], present[1::2], strict=True)), stop
    return difference_at_real_tokens(torch.cat(logits, 1), expected, mask)


def _nan_last(number: float) -> tuple[bool, float]:
    """Sorts what is not a number as the largest."""
    return number != number, number
