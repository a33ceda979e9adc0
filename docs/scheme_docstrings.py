"""Docstrings of scheme configs as Markdown: summary, body, options."""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import Any

from hf_posenc.cli.catalogue import meanings_of
from hf_posenc.report.tables import markdown_table
from hf_posenc.schemes import SchemeConfig, SubConfig
from hf_posenc.schemes.labels import scheme_label

_SECTION = re.compile(r"^(?:Args|Raises|Returns|Attributes|Example|Examples|Note|Notes):$", re.MULTILINE)
_TABLE_RULE = re.compile(r"^=+( +=+)+$")
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Option:
    """One field of a config: its name, type, default and what the docstring says about it."""

    name: str
    type: str
    default: str
    meaning: str


def summary(config_class: type[SchemeConfig]) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join(_text(config_class).split("\n\n")[0].split())


def body(config_class: type[SchemeConfig]) -> str:
    """What stands between the first paragraph and the sections, as Markdown."""
    lines = _SECTION.split(_text(config_class))[0].splitlines()
    start = next((index for index, line in enumerate(lines) if not line.strip()), len(lines))
    return markdown(lines[start:])


def options(config_class: type[SchemeConfig]) -> list[Option]:
    """The fields of a config with their types, defaults and descriptions; inherited ones too."""
    meanings: dict[str, str] = {}
    for owner in reversed(config_class.__mro__):
        if owner.__doc__ and dataclasses.is_dataclass(owner):
            meanings |= meanings_of(inspect.cleandoc(owner.__doc__))
    return [
        Option(field.name, _type_name(field), _default(field), meanings.get(field.name, ""))
        for field in dataclasses.fields(config_class)
    ]


def arxiv_ids(config_class: type[SchemeConfig]) -> list[str]:
    """The arXiv ids in the docstring, in order."""
    return list(dict.fromkeys(_ARXIV.findall(_text(config_class))))


def linked(text: str) -> str:
    """`text` with every arXiv id as a link."""
    return _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def markdown(lines: list[str]) -> str:
    """The reStructuredText of docstrings: literal blocks become fenced code, simple tables Markdown tables."""
    result: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if _TABLE_RULE.match(line):
            table, index = _table(lines, index)
            result += table
        elif line.rstrip().endswith("::"):
            text = line.rstrip()[:-2]
            result += [linked(text) + ":"] if text.strip() else []
            block, index = _indented(lines, index + 1)
            result += ["", "```text", *block, "```", ""]
        else:
            result.append(linked(line))
            index += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(result)).strip()


def table_cell(text: str) -> str:
    """`text` for a Markdown table: in one line, with its bars escaped."""
    return linked(" ".join(text.split())).replace("|", "\\|")


def _text(config_class: type[SchemeConfig]) -> str:
    return inspect.cleandoc(config_class.__doc__ or "")


def _type_name(field: dataclasses.Field[Any]) -> str:
    return field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if isinstance(value, SchemeConfig):
        return f"`{scheme_label(value)}`"
    if isinstance(value, SubConfig):
        return f"`{value!r}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def _indented(lines: list[str], start: int) -> tuple[list[str], int]:
    """The indented block at or after `start`, without its indent, and the index of the line after it."""
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
        end += 1
    block = inspect.cleandoc("\n".join(["", *lines[start:end]])).splitlines()
    return block, end


def _table(lines: list[str], start: int) -> tuple[list[str], int]:
    """A simple table whose first rule is at `start`; a row without a first cell continues the one above."""
    spans = [match.span() for match in re.finditer("=+", lines[start])]
    starts = [first for first, _ in spans]
    ends = [*starts[1:], None]
    rows: list[list[str]] = []
    rules, index = 0, start
    while index < len(lines) and rules < 3:
        line = lines[index]
        if _TABLE_RULE.match(line):
            rules += 1
        elif line.strip():
            cells = [line[first:last].strip() for first, last in zip(starts, ends, strict=True)]
            if cells[0] or not rows:
                rows.append(cells)
            else:
                rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
        index += 1
    head, *others = [[table_cell(cell) for cell in row] for row in rows]
    return markdown_table(head, others).splitlines(), index
