"""How long a sequence a part can encode."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from hf_posenc.schemes.validation import check_positions_below


@dataclass(frozen=True)
class Reach:
    """The lengths of one part, in tokens.

    Args:
        length: of the longest sequence it can encode; `None` without a limit.
        remedy: the end of the sentence "A sequence of length 9 is longer than the 8 positions ...": what the positions
            are, and which option gives more of them.
        made_for: the length that the options of the part were chosen for, such as `factor * original_max_positions` of
            YaRN; `None` where they name none.
    """

    length: int | None = None
    remedy: str = ""
    made_for: int | None = None

    def check(self, ids: Tensor) -> None:
        """Refuses positions past the limit.

        Raises:
            SequenceLengthError: naming the length found, the limit and the remedy.
        """
        if self.length is not None:
            check_positions_below(ids, self.length, self.remedy)

    def under(self, last_position: Callable[[int], int | None]) -> Reach:
        """The reach of a part that is given other positions.

        Args:
            last_position: the greatest position that tokens at positions up to its argument may get, which must not
                decrease; `None` where that is not known, and the limit is then taken to stay what it is.
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
    """The reach of parts that act together: the shortest limit, and the longest length that one was made for."""
    found = list(reaches)
    limited = [reach for reach in found if reach.length is not None]
    limit = min(limited, key=lambda reach: reach.length or 0, default=Reach())
    made_for = max((reach.made_for for reach in found if reach.made_for is not None), default=None)
    return Reach(limit.length, limit.remedy, made_for)
