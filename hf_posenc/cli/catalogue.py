"""The verb `schemes`, which lists schemes and their options, and the parser of layer numbers."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import textwrap
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import UsageError
from hf_posenc.report.tables import format_table, terminal_width

if TYPE_CHECKING:
    from hf_posenc.schemes.config import SchemeConfig


REQUIRED = "required"


def schemes(options: argparse.Namespace) -> int:
    """Lists all schemes, then all arrangements, or shows the named ones in detail."""
    from hf_posenc.schemes import get_scheme, registered_configs

    shown = [get_scheme(name) for name in options.names] or sorted(registered_configs(), key=attrgetter("combinator"))
    keys = ("name", "summary", "arrangement", "options")
    rows = [(config.name, summary(config), config.combinator, defaults_of(config)) for config in shown]
    if options.json:
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
    elif options.names:
        print("\n\n".join(map(_description, shown)))
    else:
        for headline in ("scheme", "arrangement"):
            cells = [
                [name, meaning, "  ".join(f"{option}={_typed(value)}" for option, value in defaults.items())]
                for name, meaning, is_arrangement, defaults in rows
                if is_arrangement == (headline == "arrangement")
            ]
            print(format_table([headline, "what it is", "options"], cells), end="\n\n")
        print("hf-posenc schemes NAME shows one scheme with the types and meanings of its options.")
    return 0


def summary(config: type[SchemeConfig]) -> str:
    """Returns the first paragraph of a config's docstring in one line."""
    return " ".join((inspect.getdoc(config) or "").split("\n\n")[0].split())


def defaults_of(config: type[SchemeConfig]) -> dict[str, Any]:
    """Returns the defaults of a config's options, JSON-ready; `REQUIRED` if there is none."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value: Any = REQUIRED
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        defaults[field.name] = value.to_dict() if hasattr(value, "to_dict") else value
    return defaults


def meanings_of(documentation: str) -> dict[str, str]:
    """Returns what the "Args" section of a dedented docstring says about each argument, as one line per argument."""
    section = documentation.partition("\nArgs:\n")[2].partition("\n\n")[0]
    meanings: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith(" " * 5):
            meanings[name] += f" {line.strip()}"
        elif line.strip():
            name, _, text = line.strip().partition(":")
            meanings[name] = text.strip()
    return meanings


def _description(config: type[SchemeConfig]) -> str:
    from hf_posenc.schemes.validation import kind_of

    meanings, defaults = meanings_of(inspect.getdoc(config) or ""), defaults_of(config)
    lines = [config.name, summary(config), "" if defaults else "\nIt has no options."]
    for field in dataclasses.fields(config):
        default = defaults[field.name]
        lines.append(f"  {field.name}: {kind_of(field)}, {'' if default == REQUIRED else 'default '}{_typed(default)}")
        width = (terminal_width() or 120) - 6
        wrapped = textwrap.wrap(meanings.get(field.name, ""), width, break_long_words=False)
        lines += [f"      {line}" for line in wrapped]
    return "\n".join([*lines, "", f"More: help({config.__module__}.{config.__name__})"])


def _typed(default: Any) -> str:
    """Returns a default as a user would type it. A nested scheme is shown by its name."""
    return str(default["scheme"] if isinstance(default, dict) and "scheme" in default else default)


def parse_layers(text: str) -> list[int]:
    """Parses `"0,1,2"` or `"0-3,8"` to a list.

    Raises:
        UsageError: if the text has another form.
    """
    layers: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise UsageError(f"--layers takes numbers and ranges such as 0,1,2 or 0-3,8; got {item!r} in {text!r}.")
        layers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return layers
