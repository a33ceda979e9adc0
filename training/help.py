"""Short and full help: `--help` summarises the options of a script, `--help-all` explains every option."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from hf_posenc.errors import close_names


class GroupedHelp(argparse.ArgumentParser):
    """A parser that prints its argument groups, with the first sentence about each option.

    Args:
        further: a sentence about what `--help-all` adds. It ends with a period.
        settings: further arguments of `ArgumentParser`. The description is printed without wrapping.
    """

    def __init__(self, *args: Any, further: str, **settings: Any) -> None:
        fixed: dict[str, Any] = {"add_help": False, "formatter_class": _Full}
        usage: dict[str, Any] = {"usage": "%(prog)s [SETTINGS.yaml] [--option value ...]", "allow_abbrev": False}
        super().__init__(*args, **(usage | settings | fixed))
        self.further = further
        unstored: dict[str, Any] = {"nargs": 0, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        self.add_argument("-h", "--help", action=_ShortHelp, help="print a summary of the options", **unstored)
        self.add_argument("--help-all", action="help", help="print a full explanation of every option")

    def refusal(self, name: str, place: str) -> str:
        """Returns the message for an unknown option, given without dashes."""
        known = [action.dest for action in self._actions if action.dest != argparse.SUPPRESS]
        close = " or ".join(f"--{near}" for near in close_names(name, known))
        hint = f" Did you mean {close}?" if close else ""
        return f"Unknown option --{name} in {place}.{hint} --help-all lists every option."


class _ShortHelp(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        formatter = _Short(parser.prog)
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        formatter.add_text(parser.description)
        # The first two groups are argparse's own. Options without a group of the script are left to --help-all.
        for group in parser._action_groups[2:]:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        text = f"{parser.further} --help-all explains every option in full."
        formatter.add_text(textwrap.fill(text, formatter._width, break_on_hyphens=False))
        print(formatter.format_help(), end="")
        parser.exit()


class _Full(argparse.RawDescriptionHelpFormatter):
    """Shows the name of an option once, and its default after its meaning."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # The same names with dashes are accepted too.
        names = [name for name in action.option_strings if "-" not in name.lstrip("-") or name == "--help-all"]
        return f"{', '.join(names)} {'' if action.nargs in (0, '?') else self._value_of(action)}".rstrip()

    def _value_of(self, action: argparse.Action) -> str:
        return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else "VALUE"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = " ".join((action.help or "").split())
        if action.default in (None, "", argparse.SUPPRESS) or action.default is False or "default:" in text.lower():
            return text
        is_list = isinstance(action.default, Iterable) and not isinstance(action.default, str | dict)
        shown = ",".join(map(str, action.default)) if is_list else str(action.default)
        return f"{text} (default: {shown.replace('%', '%%')})"


class _Short(_Full):
    def _value_of(self, action: argparse.Action) -> str:
        return "VALUE"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action)
        sentence = re.split(r"(?<=[.;]) (?=[A-Z(])", re.sub(r" \(default: .*\)$", "", text))[0].rstrip(".")
        default = re.search(r"\(default: .{1,24}\)$", text)
        return f"{sentence} {default.group()}" if default else sentence
