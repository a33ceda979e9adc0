"""Compares a written stock checkpoint with the model that it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.export.samples import float32_reference, random_ids, relative_difference, spans
from hf_posenc.patching.call.caches import cache_argument, first_cache

#: Maximum difference at which two models count as equal, in float32; relative for outputs larger than 1.
TOLERANCE = 1e-5
_DECODED = 16


@dataclass(frozen=True)
class Comparison:
    """The difference of the outputs at some positions.

    Args:
        mode: "prefill" or "decode", as in a `Check`.
        start: first position.
        stop: the position after the last.
        difference: as `relative_difference` returns it; not a number, or infinity, if the stock model cannot run there.
    """

    mode: str
    start: int
    stop: int
    difference: float

    @property
    def equal(self) -> bool:
        """Whether the models count as equal there."""
        return self.difference <= TOLERANCE

    def __str__(self) -> str:
        where = "token by token" if self.mode == "decode" else "on random tokens"
        return f"{self.difference:.3g} {where} at the positions {self.start} to {self.stop - 1} (allowed: {TOLERANCE})"


@torch.no_grad()
def comparisons(
    model: PreTrainedModel, model_class: type[PreTrainedModel], draft: Path, variant: str | None
) -> list[Comparison]:
    """Loads a written checkpoint with stock code and compares it with the model.

    Raises:
        UnsupportedError: if the stock class does not have the same weights, or cannot run.
    """
    stock, info = model_class.from_pretrained(draft, dtype=torch.float32, variant=variant, output_loading_info=True)
    missing = [str(key) for key in info["missing_keys"]]
    if getattr(model.base_model, "pooler", model) is None:
        # The model was built without the pooler of its class, and nothing reads it in the stock model.
        missing = [key for key in missing if ".pooler." not in f".{key}"]
    stray = sorted([*missing, *map(str, info["unexpected_keys"])])
    if stray:
        raise UnsupportedError(f"A {model_class.__name__} does not have the same weights: {', '.join(stray[:5])}.")
    stock = stock.to(model.device).eval()
    reference = float32_reference(model)
    found = [Comparison("prefill", *span, _difference(reference, stock, *span)) for span in spans(model)]
    if model.can_generate() and not model.config.is_encoder_decoder:
        stop = min(_DECODED, found[0].stop)
        found.append(Comparison("decode", stop // 2, stop, _decoded_difference(reference, stock, stop)))
    return found


def _difference(reference: PreTrainedModel, stock: PreTrainedModel, start: int, stop: int) -> float:
    ids = random_ids(reference, stop - start)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": False}
    if reference.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    if start > 0:
        arguments["position_ids"] = torch.arange(start, stop, device=ids.device).unsqueeze(0)
    try:
        expected = reference(**arguments)[0]
    except SequenceLengthError:
        # The table is shorter than the shortest comparison, so compare at a smaller length.
        return _difference(reference, stock, start, start + (stop - start) // 2)
    try:
        return relative_difference(_run(stock, **arguments)[0], expected)
    except IndexError:
        return float("inf")


def _run(stock: PreTrainedModel, **arguments: Any) -> Any:
    try:
        return stock(**arguments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(f"a stock {type(stock).__name__} with this config cannot run: {error}") from error


def _decoded_difference(reference: PreTrainedModel, stock: PreTrainedModel, stop: int) -> float:
    """Compares the second half of a sequence, which the stock model reads token by token, with a whole forward."""
    ids, first = random_ids(reference, stop), stop // 2
    expected = reference(input_ids=ids, use_cache=False).logits[:, first:]
    output = _run(stock, input_ids=ids[:, :first], use_cache=True)
    steps = []
    for position in range(first, stop):
        cache = {cache_argument(stock): first_cache(output.values())}
        output = _run(stock, input_ids=ids[:, [position]], **cache, use_cache=True)
        steps.append(output.logits)
    return relative_difference(torch.cat(steps, dim=1), expected)
