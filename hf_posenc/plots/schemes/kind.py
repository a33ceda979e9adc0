"""What every kind of figure is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_posenc.plots.schemes.subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure: which schemes it can show, and how.

    Args:
        name: what it is called on the command line and in file names.
        summary: what it shows, for lists of kinds.
        applies: whether a scheme has anything to show here.
        draw: draws a scheme that `applies` accepts.
        caption: sentences that say what is drawn for this scheme, with its inputs.
    """

    name: str
    summary: str
    applies: Callable[[Subject], bool]
    draw: Callable[[Subject], Figure]
    caption: Callable[[Subject], str]
