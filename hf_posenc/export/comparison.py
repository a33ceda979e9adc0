"""Compares an export with the model it was made from: chooses the tokens, and decides what counts as equal."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import MeasurementError
from hf_posenc.export.records import Check
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.schemes.config import walk

_SHORT = 48
_LONGEST = 8192


def largest(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The check with the largest difference of each output in each mode, mode by mode."""
    modes: dict[str, dict[str, Check]] = {}
    for check in checks:
        largest_of = modes.setdefault(check.mode, {})
        before = largest_of.get(check.quantity, check)
        largest_of[check.quantity] = check if check.size > before.size else before
    return tuple(check for largest_of in modes.values() for check in largest_of.values())


def excess(program: str, checks: Iterable[Check]) -> str:
    """Says in a sentence how far an export is off; empty if it counts as equal.

    Args:
        program: what has run it.
        checks: the largest differences.
    """
    named = [
        f"the {check.quantity} by {check.difference:.3g} ({check.mode}{check.place}, allowed: {check.allowed:g})"
        for check in checks
        if check.allowed is not None and not check.equal
    ]
    if not named:
        return ""
    sentence = ", ".join([named[0].replace(" by ", " differ by ", 1), *named[1:]])
    return f"{program} gives different numbers. {sentence[0].upper()}{sentence[1:]}"


def accepted(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The checks without limits: any difference is accepted."""
    return tuple(replace(check, allowed=None) for check in checks)


def float32_reference(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float32: itself, or a copy."""
    return model if model.dtype == torch.float32 else copy.deepcopy(model).float()


def relative_difference(computed: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest expected value where that exceeds 1.

    Raises:
        MeasurementError: if an expected value is NaN or infinite.
    """
    expected = expected.float()
    size = expected.abs().max().clamp(min=1.0)
    if not size.isfinite():
        raise MeasurementError(
            "The model itself computes NaN or infinity, so no export can be compared with it. Its weights may be "
            "damaged: load the checkpoint again, and look for weights that are not finite."
        )
    return float((computed.float() - expected).abs().max() / size)


def difference_at_real_tokens(computed: Tensor, expected: Tensor, mask: Tensor) -> float:
    """The relative difference at tokens that are not padding; infinite for another shape.

    Args:
        computed: `(batch, length, ...)`, or an output without a length, all of which counts.
        expected: what it should be.
        mask: `(batch, length)`, 1 at real tokens.
    """
    if computed.shape != expected.shape:
        return float("inf")
    if computed.shape[:2] == mask.shape:
        computed, expected = computed[mask.bool()], expected[mask.bool()]
    return relative_difference(computed, expected)


def random_ids(model: PreTrainedModel, length: int, batch: int = 1) -> Tensor:
    """`(batch, length)` ordinary tokens, the same in every call: no padding, first or last token of a text.

    Some architectures derive positions from padding tokens in the input.
    """
    config = model.config.get_text_config()
    special: set[int | None] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, list) else [value])
    ordinary = torch.tensor([token for token in range(min(config.vocab_size, _LONGEST)) if token not in special])
    picks = torch.randint(0, len(ordinary), (batch, length), generator=torch.Generator().manual_seed(0))
    return ordinary[picks].to(model.device)


def spans(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Returns the positions to compare at, as the first one and the one after the last: a short sequence, one that is
    longer than a sliding window, and one beyond the original length of a scaling.
    """
    config = model.config.get_text_config()
    windows = [getattr(config, "sliding_window", None), getattr(config, "local_attention", None)]
    ends = [_SHORT, *(window + 16 for window in windows if isinstance(window, int))]
    encoding = current_encoding(model)
    limit = getattr(config, "max_position_embeddings", None)
    original = (getattr(config, "rope_parameters", None) or {}).get("original_max_position_embeddings")
    if encoding is not None:
        limit = None if encoding.lengths is None else encoding.lengths.reach.length
        scalings = (getattr(scheme, "scaling", None) for scheme in walk(encoding.config))
        lengths = (getattr(scaling, "original_max_positions", None) for scaling in scalings)
        original = max(filter(None, lengths), default=None)
    ranges = {(0, min(end, limit or _LONGEST, _LONGEST)) for end in ends}
    if isinstance(original, int):
        # A scaling depends on the largest position, so a few tokens there are enough. Not all models take positions.
        if "position_ids" in inspect.signature(model.forward).parameters:
            end = min(2 * original, limit or 2 * original)
            ranges.add((max(0, end - _SHORT), end))
        else:
            ranges.add((0, min(original + 16, limit or _LONGEST, _LONGEST)))
    return sorted(ranges)
