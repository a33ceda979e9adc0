"""The errors of the library. Each message says what was found, why it cannot work, and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PositionEncodingError(Exception):
    """Base of every error raised by `hf_posenc`."""


class UnknownNameError(PositionEncodingError, ValueError):
    """A scheme, option or architecture name that nobody registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(repr(match) for match in close)}?" if close else ""
        super().__init__(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known) or 'none'}.")


class UnsupportedError(PositionEncodingError, ValueError):
    """A combination of architecture, scheme, attention back-end or cache that cannot be computed correctly."""


class SequenceLengthError(PositionEncodingError, IndexError):
    """A sequence that is longer than the encoding can represent."""
