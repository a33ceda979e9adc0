"""`results.json` of the kit: rows by part, each part with the machine and the settings it was measured with."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Row
from benchmarks.store import ResultsFile, check_same

#: Seconds between two writes of the file; a row that came out since then is lost if the machine goes down.
_PAUSE = 1.0


class Store(ResultsFile):
    """The content of `results.json`, and the file.

    Args:
        folder: of the file, which is read if it is there.
        forgotten: parts whose earlier results are dropped when they begin anew, and not before: a run that cannot begin
            leaves the file as it was.
        command: what is run, kept with the results once a part begins.

    Raises:
        BenchmarkError: if the file cannot be read.
    """

    depth = 5

    def __init__(self, folder: Path, forgotten: Sequence[str] = (), command: str = "") -> None:
        super().__init__(folder / "results.json", {"parts": {}}, go_on=True)
        self.forgotten = set(forgotten)
        self.command = command
        self._saved = 0.0

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
        remedy = f"Choose another --output_dir, or pass --overwrite with --parts {part} to run this part anew."
        for kind in ("machine", "settings"):
            check_same(found[kind], fresh[kind], kind, f"The part {part!r} in {self.path}", remedy)
        found["cells"] = fresh["cells"]
        if self.command:
            self.note_command(self.command)

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
        super().save()
        self._saved = time.monotonic()


def cells_left(part: dict[str, Any]) -> list[str]:
    """The cells of a part that have no row yet."""
    return [cell for cell in part["cells"] if cell not in part["rows"]]
