"""The verb `hf-posenc schemes`."""

from __future__ import annotations

import argparse
import json
import textwrap

from hf_posenc.cli.catalogue import REQUIRED, Entry, entries
from hf_posenc.other_names import unknown_scheme
from hf_posenc.report.tables import format_table, terminal_width


def schemes(options: argparse.Namespace) -> int:
    """`hf-posenc schemes`: all schemes and arrangements, or what the named ones are and take."""
    known = entries()
    by_name = {entry.name: entry for entry in known}
    for name in options.names:
        if name not in by_name:
            raise unknown_scheme(name, by_name)
    shown = [by_name[name] for name in options.names] or known
    if options.json:
        print(json.dumps([entry.to_dict() for entry in shown], indent=2))
    elif options.names:
        print("\n\n".join(_description(entry) for entry in shown))
    else:
        for headline in ("scheme", "arrangement"):
            rows = [
                [
                    entry.name,
                    entry.summary,
                    "  ".join(f"{option.name}={option.text}" for option in entry.options),
                ]
                for entry in shown
                if entry.arrangement == (headline == "arrangement")
            ]
            print(format_table([headline, "what it is", "options"], rows), end="\n\n")
        print("hf-posenc schemes NAME shows one with the types and meanings of its options.")
    return 0


def _description(entry: Entry) -> str:
    meanings = entry.meanings()
    lines = [entry.name, entry.summary, "" if entry.options else "\nIt has no options."]
    for option in entry.options:
        default = "required" if option.default == REQUIRED else f"default {option.text}"
        lines.append(f"  {option.name}: {option.type}, {default}")
        if option.name in meanings:
            lines.append(_indented(meanings[option.name]))
    return "\n".join([*lines, "", f"More: help({entry.path})"])


def _indented(text: str) -> str:
    width = terminal_width() or 120
    return textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_long_words=False)
