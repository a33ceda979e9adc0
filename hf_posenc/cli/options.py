"""Schemes and their options, as typed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from hf_posenc.cli.catalogue import entries
from hf_posenc.errors import UnknownNameError, UsageError
from hf_posenc.other_names import unknown_scheme

if TYPE_CHECKING:
    from hf_posenc.schemes.config import SchemeConfig


def parse_value(text: str) -> Any:
    """A number, a truth value, `None`, JSON, or else the text itself.

    >>> [parse_value(text) for text in ("5e5", "500_000", "True", "none", "[1, 2]", "half")]
    [500000.0, 500000, True, None, [1, 2], 'half']
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for parse in (int, float, json.loads):
        try:
            return parse(text)
        except ValueError:
            continue
    if text[:1] in ("{", "["):
        raise UsageError(f"{text!r} looks like JSON but is not. In a shell, put it in single quotes.")
    return text


def parse_options(pairs: Iterable[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """`["theta=5e5", "layout=interleaved"]` as a dictionary.

    Args:
        pairs: the options.
        texts: names of those whose values are text, whatever they look like.

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
        options[name] = value if name in texts else parse_value(value)
    return options


def parse_scheme(text: str, pairs: Iterable[str] = ()) -> SchemeConfig:
    """`"rope:theta=5e5,layout=half"`, and further options, as a config.

    Raises:
        UnknownNameError: for an unknown scheme or option.
        UsageError: for a value out of range.
    """
    name, _, inline = text.partition(":")
    _check_name(name)
    from hf_posenc.schemes.option_types import is_text
    from hf_posenc.schemes.registry import get_scheme

    config_class = get_scheme(name)
    texts = [field.name for field in dataclasses.fields(config_class) if is_text(field)]
    options = parse_options([*_split_inline(inline), *pairs], texts)
    try:
        return config_class.from_options(options)
    except UnknownNameError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"Scheme {name!r}: {error}") from error


def _check_name(name: str) -> None:
    """Refuses an unknown name before torch is imported."""
    known = [entry.name for entry in entries()]
    if name not in known:
        raise unknown_scheme(name, known)


def _split_inline(text: str) -> list[str]:
    """Splits at the commas that stand outside of brackets, so that a value may be JSON."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece]


def parse_layers(text: str) -> list[int]:
    """`"0,1,2"` or `"0-3,8"` as a list.

    Raises:
        UsageError: for anything else.
    """
    layers: list[int] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        try:
            span = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise UsageError(f"--layers takes numbers such as 0,1,2 or 0-3,8; got {text!r}.") from None
        if not span:
            raise UsageError(f"--layers: {item!r} is an empty range.")
        layers += span
    return layers
