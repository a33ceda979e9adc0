"""Exceptions of the library. Each message says what was found, why it cannot work, and what to do instead."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import ClassVar

#: Packages that warnings and notes do not point at. `contextlib` and `functools` call the functions that they wrap.
NOT_OF_THE_USER = {"hf_posenc", "transformers", "torch", "accelerate", "peft", "contextlib", "functools"}
#: Maximum number of characters of a name in a message.
_LONGEST_NAME = 100
#: A message that says where names are listed lists at most this many names itself.
_MOST_LISTED = 12
#: Collects the library's warnings of a thread instead of showing them.
COLLECTED: ContextVar[list[str] | None] = ContextVar("collected", default=None)


class PositionEncodingError(Exception):
    """Base class of all errors of `hf_posenc`.

    Attributes:
        is_list: whether the lines of the message are items of lists, so that a command prints them as lines.
    """

    is_list: ClassVar[bool] = False


class UnknownNameError(PositionEncodingError, ValueError):
    """A scheme, option or architecture name is unknown.

    Args:
        kind: kind of name, such as "scheme".
        name: the unknown name.
        known: the known names.
        owner: owner of the names, for a message like "Unknown option 'thetha' of scheme 'rope'".
        hint: a suggestion to use instead of similar names.
        listing: something that lists the known names, such as a command.
        remedy: what to do if the name is correct.

    Attributes:
        known: the known names, sorted.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        *,
        owner: str = "",
        hint: str = "",
        listing: str = "",
        remedy: str = "",
    ) -> None:
        known = self.known = sorted(known)
        name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
        hint = hint or did_you_mean(close_names(name, known))
        of_whom = f" of {owner}" if owner else ""
        listed = f"Known: {', '.join(known) or 'none'}."
        if listing and len(known) > _MOST_LISTED:
            listed = f"All are listed by {listing}."
        sentences = (f"Unknown {kind} {name!r}{of_whom}.", hint, listed, remedy)
        super().__init__(" ".join(filter(None, sentences)))


def close_names(name: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Returns up to three known names that are similar to a name, ignoring case, the closest first."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    if name.lower() in by_lower:
        return [by_lower[name.lower()]]
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)]


def did_you_mean(close: Sequence[str]) -> str:
    """Returns a question that names similar names; empty if there are none."""
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""


def missing_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the error for a missing module attribute, with the closest existing name."""
    close = [] if name.startswith("_") else close_names(name, known)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)


class UnsupportedError(PositionEncodingError, ValueError):
    """A combination of architecture, scheme, attention backend or cache is not supported."""


class SequenceLengthError(PositionEncodingError, IndexError):
    """A sequence is longer than the encoding supports."""


class UsageError(Exception):
    """A command or script cannot run with the given arguments; the message says why and what to do."""


class MissingPackageError(PositionEncodingError, UsageError, ImportError):
    """A package of an extra is not installed; the message names both."""


class MeasurementError(PositionEncodingError, ValueError):
    """A measurement would be meaningless for the given model, sentence, swap or tokenizer."""


def warn_user(message: str) -> None:
    """Warns with the location of the caller outside of this library and transformers."""
    if (collected := COLLECTED.get()) is not None:
        collected.append(message)
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in NOT_OF_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
