"""What a how-to page asks its reader to save and to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how_to"


def page_text(page: str) -> str:
    """The Markdown of a page of docs/how_to."""
    return (HOW_TO / f"{page}.md").read_text(encoding="utf-8")


def saved_files(page: str) -> dict[str, str]:
    """The files that a page shows, each with the sentence 'Save this as `name`' before it."""
    found = re.findall(r"[Ss]ave this as\s+`([\w.]+)`(?:(?!```).)*?```\w+\n(.*?)```", page_text(page), flags=re.DOTALL)
    assert len(found) == len(re.findall(r"[Ss]ave this as", page_text(page)))
    return dict(found)


def commands(page: str, program: str) -> list[list[str]]:
    """The words after `program` in each of the shell commands of a page that start it, with variables filled in."""
    blocks = re.findall(r"```bash\n(.*?)```", page_text(page), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    variables = {}
    found = []
    for line in lines:
        if assigned := re.fullmatch(r"([A-Z]+)=(.*)", line.strip()):
            variables[assigned[1]] = "".join(shlex.split(assigned[2])) if "$(" not in assigned[2] else "model"
            continue
        if looped := re.fullmatch(r"for ([A-Z]+) in (\S+).*; do", line):
            variables[looped[1]] = looped[2]
        words = [
            re.sub(r"\$([A-Z]+)", lambda name: variables[name[1]], word) for word in shlex.split(line, comments=True)
        ]
        start = shlex.split(program)
        for place in range(len(words)):
            if words[place : place + len(start)] == start:
                found.append(words[place + len(start) :])
    return found
