"""The maximum sequence length of a part."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError
from hf_posenc.schemes.positions import Positions, assert_in_graph


@dataclass(frozen=True)
class Reach:
    """The maximum length and the intended length of one part, in tokens.

    Args:
        length: the longest sequence that the part can encode; `None` if there is no limit.
        remedy: the end of the error message "A sequence of length 9 is longer than the 8 positions ...". It says which
            positions these are and which option increases their number.
        made_for: the length that the options of the part are configured for, such as `factor * original_max_positions`
            of YaRN; `None` if the options do not specify one.
    """

    length: int | None = None
    remedy: str = ""
    made_for: int | None = None

    def check(self, positions: Positions | Tensor) -> None:
        """Raises an error if a position exceeds the limit.

        The check may read values, so it is skipped when there are none (graph capture, the meta device). Values on a
        device are not read if the host knows that they are small enough. A compiled graph checks them when it runs.

        Args:
            positions: those of a call, or any tensor of them.

        Raises:
            SequenceLengthError: naming the length found, the limit and the remedy.
        """
        if isinstance(positions, Tensor):
            positions = Positions(positions, positions)
        ids = positions.ids
        if self.length is None or ids.is_meta or ids.numel() == 0:
            return
        if torch.compiler.is_compiling():
            assert_in_graph((ids < self.length).all(), f"A token is beyond the {self.length} positions {self.remedy}")
            return
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if not positions.all_below(self.length):
            raise SequenceLengthError(
                f"A sequence of length {positions.length()} is longer than the {self.length} positions {self.remedy}"
            )

    def under(self, last_position: Callable[[int], int | None]) -> Reach:
        """Returns the reach of this part if its positions are mapped.

        Args:
            last_position: a function that takes a position and returns the greatest position that tokens up to it can
                be mapped to. It must not decrease. With `None`, the limit is not changed.
        """
        limit, most = self.length, sys.maxsize
        if limit is None or last_position(most - 1) is None:
            return Reach(limit, self.remedy)

        def beyond(length: int) -> bool:
            last = last_position(length - 1)
            return last is not None and last >= limit

        longest = bisect.bisect_left(range(1, most), True, key=beyond)
        return Reach(None if longest == most - 1 else longest, self.remedy)


def shortest(reaches: Iterable[Reach]) -> Reach:
    """Returns the reach of combined parts: the smallest `length` and the largest `made_for`."""
    all_reaches = list(reaches)
    limited = [reach for reach in all_reaches if reach.length is not None]
    limit = min(limited, key=lambda reach: reach.length or 0, default=Reach())
    made_for = max((reach.made_for for reach in all_reaches if reach.made_for is not None), default=None)
    return Reach(limit.length, limit.remedy, made_for)
