"""Compares a written stock checkpoint with the model that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.export.samples import float32_reference, random_ids, relative_difference, spans

#: Maximum difference at which two models count as equal, in float32; relative for outputs larger than 1.
TOLERANCE = 1e-5


@torch.no_grad()
def measured_difference(
    model: PreTrainedModel, model_class: type[PreTrainedModel], draft: Path, variant: str | None
) -> tuple[float, tuple[int, int]]:
    """Returns the largest difference of the outputs, and the positions where it was found.

    Raises:
        UnsupportedError: if the stock class does not have the same weights.
    """
    stock, info = model_class.from_pretrained(draft, dtype=torch.float32, variant=variant, output_loading_info=True)
    missing = [str(key) for key in info["missing_keys"] if not (_has_no_pooler(model) and ".pooler." in f".{key}")]
    stray = sorted([*missing, *map(str, info["unexpected_keys"])])
    if stray:
        raise UnsupportedError(
            f"A stock {model_class.__name__} does not have the same weights: {', '.join(stray[:5])}."
        )
    stock = stock.to(model.device).eval()
    reference = float32_reference(model)
    found = [(_difference(reference, stock, start, stop), (start, stop)) for start, stop in spans(model)]
    # A difference that is not a number is the largest.
    return max(found, key=lambda pair: (pair[0] != pair[0], pair[0]))


def _has_no_pooler(model: PreTrainedModel) -> bool:
    """Whether the model was built without the pooler of its class, which nothing then reads in the stock model."""
    return getattr(model.base_model, "pooler", model) is None


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
        return relative_difference(stock(**arguments)[0], expected)
    except IndexError:
        return float("inf")
