"""The errors of the library. Each message says what was found, why it cannot work, and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Characters of a name that are worth reading.
_LONGEST_NAME = 100


class PositionEncodingError(Exception):
    """Base of every error raised by `hf_posenc`."""


class UnknownNameError(PositionEncodingError, ValueError):
    """A scheme, option or architecture name that nobody registered.

    Args:
        kind: what was named.
        name: the name.
        known: the names there are.
        owner: whose names these are, for a message like "Unknown option 'thetha' of scheme 'rope'".
        hint: a sentence on what is probably meant, in place of the nearest names.
        remedy: a sentence on what to do if the name is right.

    Attributes:
        known: the names there are, sorted.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], *, owner: str = "", hint: str = "", remedy: str = ""
    ) -> None:
        known = self.known = sorted(known)
        name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
        if not hint:
            close = close_names(name, known)
            hint = f"Did you mean {' or '.join(repr(match) for match in close)}?" if close else ""
        of_whom = f" of {owner}" if owner else ""
        sentences = (f"Unknown {kind} {name!r}{of_whom}.", hint, f"Known: {', '.join(known) or 'none'}.", remedy)
        super().__init__(" ".join(filter(None, sentences)))


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three of the known names that resemble one, whatever its case, the nearest first."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    if name.lower() in by_lower:
        return [by_lower[name.lower()]]
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)]


def missing_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error of a module for an attribute it does not have, with the nearest of those it has."""
    close = [] if name.startswith("_") else close_names(name, known)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)


class UnsupportedError(PositionEncodingError, ValueError):
    """A combination of architecture, scheme, attention back-end or cache that cannot be computed correctly."""


class SequenceLengthError(PositionEncodingError, IndexError):
    """A sequence that is longer than the encoding can represent."""


class UsageError(Exception):
    """A request of a command or a script that cannot be carried out; the message says why and what to do."""


class MeasurementError(PositionEncodingError, ValueError):
    """A sentence, a swap or a tokenizer with which a measurement would mean nothing."""
