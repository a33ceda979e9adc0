"""`results.json` of the kit: rows by part, each part with the machine and the settings it was measured with."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.gpu.part import Row
from benchmarks.json_files import with_lines, write_text

#: Seconds between two writes of the file; a row that came out since then is lost if the machine goes down.
_PAUSE = 1.0


class Store:
    """The content of `results.json`, and the file.

    Args:
        folder: of the file, which is read if it is there.
        forgotten: parts whose earlier results are dropped when they begin anew, and not before: a run that cannot begin
            leaves the file as it was.
        command: what is run, kept with the results once a part begins.

    Raises:
        BenchmarkError: if the file cannot be read.
    """

    def __init__(self, folder: Path, forgotten: Sequence[str] = (), command: str = "") -> None:
        self.path = folder / "results.json"
        self.forgotten = set(forgotten)
        self.command = command
        self.content: dict[str, Any] = {"commands": [], "parts": {}}
        self._saved = 0.0
        if self.path.exists():
            self.content |= _read(self.path)

    def begin(self, part: str, machine: dict[str, Any], settings: dict[str, Any], cells: Sequence[str]) -> None:
        """Goes on with a part, or starts it.

        Raises:
            BenchmarkError: if it was begun on another machine, with other code or with other settings.
        """
        # Through JSON, so that what was just made equals what was read.
        fresh = json.loads(json.dumps({"machine": machine, "settings": settings, "cells": list(cells)}))
        if part in self.forgotten:
            self.content["parts"].pop(part, None)
            self.forgotten.discard(part)
        found = self.content["parts"].setdefault(part, fresh | {"rows": {}})
        for kind in ("machine", "settings"):
            if found[kind] != fresh[kind]:
                there, here = found[kind], fresh[kind]
                names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
                told = [f"{name} {there.get(name)!r} there, {here.get(name)!r} here" for name in names]
                raise BenchmarkError(
                    f"The part {part!r} in {self.path} was begun with another {kind} ({'; '.join(told)}), and its rows "
                    "are only comparable within one. Choose another --output_dir, or pass --overwrite with --parts "
                    f"{part} to run this part anew."
                )
        found["cells"] = fresh["cells"]
        if self.command and self.command not in self.content["commands"]:
            self.content["commands"].append(self.command)

    def rows(self, part: str) -> dict[str, Row]:
        """What came out of a part so far, by cell."""
        return self.content["parts"].get(part, {}).get("rows", {})

    def add(self, part: str, cell: str, row: Row) -> None:
        """Keeps a row, and writes the file if that was not done a moment ago."""
        self.content["parts"][part]["rows"][cell] = row
        if time.monotonic() - self._saved > _PAUSE:
            self.save()

    def save(self) -> None:
        """Writes the file atomically."""
        write_text(self.path, with_lines(self.content, 5) + "\n")
        self._saved = time.monotonic()


def cells_left(part: dict[str, Any]) -> list[str]:
    """The cells of a part that have no row yet."""
    return [cell for cell in part["cells"] if cell not in part["rows"]]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BenchmarkError(
            f"{path} cannot be read ({error}): it is not what this kit has written. Remove it, and everything is run "
            "anew."
        ) from error
    if not (
        isinstance(found, dict) and isinstance(found.get("commands"), list) and isinstance(found.get("parts"), dict)
    ):
        raise BenchmarkError(f"{path} does not hold results of this kit. Choose another --output_dir.")
    return found
