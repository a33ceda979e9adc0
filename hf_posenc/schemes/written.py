"""Options of a scheme as text: `theta=5e5`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from hf_posenc.errors import UsageError


def parse_value(text: str) -> Any:
    """Parses a number, a truth value, `None` or JSON; anything else is the text itself.

    >>> [parse_value(text) for text in ("5e5", "500_000", "True", "none", "[1, 2]", "half")]
    [500000.0, 500000, True, None, [1, 2], 'half']
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for parse in (int, float, json.loads):
        try:
            return parse(text)
        except (ValueError, RecursionError):
            continue
    if text[:1] in ("{", "["):
        raise UsageError(f"{text!r} looks like JSON but is not. In a shell, put it in single quotes.")
    return text


def parse_options(pairs: Iterable[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """Parses `["theta=5e5", "layout=interleaved"]` to a dictionary; the values of options in `texts` are text or JSON.

    Raises:
        UsageError: for a word without `=`, or an option given twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"An option is written name=value, got {pair!r}.")
        if name in options:
            raise UsageError(f"The option {name!r} is given twice.")
        options[name] = value if name in texts and value[:1] not in ("{", "[") else parse_value(value)
    return options
