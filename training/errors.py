"""Errors that training scripts report in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SettingsError(ValueError):
    """An invalid setting. The message says why, and what to do."""


@contextmanager
def settings_errors(where: str, *kinds: type[Exception], with_kind: bool = False) -> Iterator[None]:
    """Raises errors of these kinds as `SettingsError`.

    Args:
        where: the beginning of the message, such as the name and value of an option.
        kinds: the classes of the errors.
        with_kind: whether the message also has the class of the error. Some messages mean nothing without it.
    """
    try:
        yield
    except kinds as error:
        kind = f"{type(error).__name__}: " if with_kind else ""
        raise SettingsError(f"{where}: {kind}{error}") from error
