"""What every part of the kit is: cells by name, each of which is run by itself and comes to one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

#: Statuses of a row. What is WRONG was computed and is another result than the reference; what crashed raised an error
#: that is not the library's own refusal. A check that would not notice a missing scheme cannot tell.
OK, WRONG, REFUSED, CRASHED, SKIPPED, CANNOT_TELL = "ok", "WRONG", "refused", "crashed", "skipped", "cannot tell"
STATUSES = (WRONG, CRASHED, REFUSED, SKIPPED, CANNOT_TELL, OK)

Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What a part is given.

    Args:
        device: "cuda" or "cpu".
        smoke: whether everything has to end within seconds.
        folder: where the results go; a part may keep files of its own below `folder / "work"`.
        rows: of this part's cells that have ended, by name, those of earlier calls included.
        remaining: seconds that are left to the part.
    """

    device: str
    smoke: bool
    folder: Any
    rows: Mapping[str, Row] = field(default_factory=dict)
    remaining: Callable[[], float] = lambda: float("inf")


class OutOfTimeError(Exception):
    """A cell stopped because its part's time is up; it goes on with the next call."""


class Part(Protocol):
    """One of the parts of the kit."""

    def settings(self) -> dict[str, Any]:
        """What all rows of the part depend on, JSON-ready; rows of other settings are refused."""

    def cells(self) -> list[str]:
        """All cells, the most important ones first."""

    def run(self, cell: str) -> Row:
        """Runs one of them, with a `status` in its row. Whatever it raises is recorded as a crash.

        Raises:
            OutOfTimeError: if it goes on with the next call.
        """
