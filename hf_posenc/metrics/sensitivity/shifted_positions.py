"""Does it matter where in the context window a text stands?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.representations import rounding
from hf_posenc.metrics.sensitivity.material import TokenizedMaterial
from hf_posenc.metrics.sensitivity.outputs import outputs_of, relative_changes
from hf_posenc.patching.apply import unwrapped
from hf_posenc.patching.discovery import find_stacks
from hf_posenc.patching.table_site import table_origin

SHIFTS = (1, 16, 256)


@dataclass(frozen=True)
class Shift:
    """The same text elsewhere.

    Args:
        offset: what was added to every position; 0 where padding was put before the text instead.
        padding: how many padding tokens stand before the text.
        change: mean relative L2 change of the output at all tokens; `None` if `reason` is set.
        reason: why it could not be measured, or `None`.
    """

    offset: int
    padding: int
    change: float | None
    reason: str | None = None


@dataclass(frozen=True)
class ShiftedPositions:
    """What moving a text does.

    Args:
        windows: how many windows of text the changes are means of.
        length: their length in tokens, special tokens included.
        shifts: one per offset, then the padding.
    """

    windows: int
    length: int
    shifts: tuple[Shift, ...]


def shifted_positions(
    model: Any,
    tokens: TokenizedMaterial,
    *,
    length: int = 32,
    offsets: Sequence[int] = SHIFTS,
    padding: int = 5,
    max_windows: int = 8,
) -> ShiftedPositions:
    """Adds a number to all position ids, and then puts padding before the text.

    A relative scheme does not change with the offset, but for rounding; an absolute one does. Left padding changes
    nothing where padding is not counted.

    Args:
        model: any transformers model.
        tokens: with the text to read.
        length: tokens of text per window.
        offsets: what is added, each at least 1.
        padding: how many padding tokens.
        max_windows: at most so many windows.

    Raises:
        MeasurementError: if the text is shorter than one window, or an offset is not positive.
    """
    if length < 1 or padding < 1 or any(offset < 1 for offset in offsets):
        raise MeasurementError(
            f"length, padding and offsets are at least 1; got {length}, {padding} and {list(offsets)}."
        )
    whole = tokens.passage.shape[0] // length
    if whole == 0:
        raise MeasurementError(f"The text has {tokens.passage.shape[0]} tokens, and one window alone needs {length}.")
    ids = tokens.frame.around(tokens.passage[: whole * length].view(-1, length)[:max_windows], targets=False)
    before = outputs_of(model, ids).last
    shifts = []
    first: int | None = None
    for offset in sorted(set(offsets)):
        try:
            first = _first_position(model, ids, before) if first is None else first
            after = outputs_of(model, ids, position_ids=_counted(ids, first + offset)).last
        except (SequenceLengthError, UnsupportedError) as error:
            shifts.append(Shift(offset, 0, None, str(error)))
        else:
            shifts.append(Shift(offset, 0, float(relative_changes(before, after).mean())))
    pads = ids.new_full((ids.shape[0], padding), tokens.pad_token_id)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], dim=1)
    padded = outputs_of(model, torch.cat([pads, ids], dim=1), attention_mask=mask).last[:, padding:]
    shifts.append(Shift(0, padding, float(relative_changes(before, padded).mean())))
    return ShiftedPositions(ids.shape[0], ids.shape[1], tuple(shifts))


def _first_position(model: Any, ids: Tensor, own: Tensor) -> int:
    """The position id that the model itself gives the first token: 0, or behind the padding row of its table.

    Raises:
        UnsupportedError: if no such ids reproduce what it does without any.
    """
    origins = {table_origin(table.module) for stack in find_stacks(unwrapped(model)) for table in stack.tables}
    for first in sorted({0, *origins}):
        explicit = outputs_of(model, ids, position_ids=_counted(ids, first)).last
        if float(relative_changes(own, explicit).max()) <= rounding(own.dtype):
            return first
    raise UnsupportedError(f"{type(model).__name__} does not take position_ids that are counted from 0.")


def _counted(ids: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + ids.shape[1]).expand_as(ids)
