"""Files of results: written whole or not at all, and gone on with only where they were begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.errors import BenchmarkError


class ResultsFile:
    """A JSON file whose content can be gone on with.

    Args:
        path: of the file.
        fresh: the content of a new one, beside its commands.
        go_on: whether a file that is there is read.

    Raises:
        BenchmarkError: if the file cannot be read, or holds something else.
    """

    #: How many levels of the file have a line for each entry.
    depth: ClassVar[int]

    def __init__(self, path: Path, fresh: dict[str, Any], go_on: bool) -> None:
        self.path = path
        self.content: dict[str, Any] = {"commands": []} | fresh
        if not path.exists() or not go_on:
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise BenchmarkError(
                f"{path} cannot be read ({error}): it was changed since it was written. Remove it or pass --overwrite, "
                "and everything is measured anew."
            ) from error
        if not isinstance(found, dict) or any(
            not isinstance(found.get(name), type(value)) for name, value in self.content.items()
        ):
            raise BenchmarkError(f"{path} does not hold results of this benchmark. Choose another --output_dir.")
        self.content |= found

    def note_command(self, command: str) -> None:
        """Keeps the command, once."""
        if command not in self.content["commands"]:
            self.content["commands"].append(command)

    def save(self) -> None:
        """Writes the file atomically."""
        write_text(self.path, _with_lines(self.content, self.depth) + "\n")


def check_same(found: dict[str, Any], now: dict[str, Any], kind: str, place: str, remedy: str) -> None:
    """Refuses results that cannot be compared with those of today.

    Raises:
        BenchmarkError: naming what differs.
    """
    names = sorted(name for name in {*found, *now} if found.get(name) != now.get(name))
    if names:
        told = "; ".join(f"{name} {found.get(name)!r} there, {now.get(name)!r} here" for name in names)
        raise BenchmarkError(
            f"{place} was begun with another {kind} ({told}), and figures are only comparable within one. {remedy}"
        )


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a kill at any moment leaves either the old one or the new one.

    Raises:
        BenchmarkError: if the system does not let it.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise BenchmarkError(
            f"{path} cannot be written ({error.strerror or error}). Choose another --output_dir, or make room or "
            "permission for this one."
        ) from error


def _with_lines(value: Any, depth: int) -> str:
    """JSON with one line per entry down to a depth, and compact below it; NaN, which JSON lacks, is an error."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, allow_nan=False)
    if isinstance(value, dict):
        inside = [f"{json.dumps(name)}: {_with_lines(one, depth - 1)}" for name, one in value.items()]
        return "{\n" + ",\n".join(inside) + "\n}"
    return "[\n" + ",\n".join(_with_lines(one, depth - 1) for one in value) + "\n]"
