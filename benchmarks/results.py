"""`results.json`: every figure of a run, written after each cell, so that a run that was stopped can go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.json_files import with_lines, write_text
from benchmarks.lineup import BARE, STOCK
from benchmarks.ratios import quartiles, ratio
from benchmarks.subjects import Subject
from benchmarks.timing import Timings

#: How many levels of `results.json` have a line for each entry.
_LINES_TO_DEPTH = 4


class Book:
    """The content of `results.json`, and the file.

    Args:
        path: of the file; read if it is there.
        machine: where the run takes place.
        settings: what all cells share.
        overwrite: whether an earlier file is forgotten.

    Raises:
        BenchmarkError: if the file was made on another machine, with other versions or with other settings, or cannot
            be read.
    """

    def __init__(
        self, path: Path, machine: dict[str, Any], settings: dict[str, Any], *, overwrite: bool = False
    ) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "machine": machine,
            "settings": settings,
            "commands": [],
            "cells": {},
            "memory": {},
        }
        if path.exists() and not overwrite:
            found = _read(path)
            for part, meaning in (("machine", "a machine with other properties"), ("settings", "other settings")):
                _check_equal(found.get(part), self.content[part], meaning, path)
            self.content |= found

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """What was timed, by `cell_key`."""
        return self.content["cells"]

    @property
    def memory(self) -> dict[str, dict[str, Any]]:
        """Peaks of memory, by `memory_key`."""
        return self.content["memory"]

    def finished(self, key: str, asked: dict[str, Any]) -> bool:
        """Whether a cell was measured just as it is asked for now."""
        return key in self.cells and self.cells[key]["asked"] == asked

    def note_command(self, command: str) -> None:
        """Keeps the command, once."""
        if command not in self.content["commands"]:
            self.content["commands"].append(command)

    def save(self) -> None:
        """Writes the file atomically."""
        write_text(self.path, with_lines(self.content, _LINES_TO_DEPTH) + "\n")


def cell_key(level: str, phase: str, length: int) -> str:
    """The name of a cell."""
    return f"{level} {phase} {length}"


def memory_key(level: str, subject: str, phase: str, length: int) -> str:
    """The name of a measurement of memory."""
    return f"{level} {phase} {length} {subject}"


def cell_rows(subjects: Sequence[Subject], timings: Timings) -> list[dict[str, Any]]:
    """One row per subject that was timed: milliseconds of every round, and ratios within rounds."""
    rows = []
    for subject in subjects:
        seconds = timings.seconds.get(subject.name)
        if not seconds:
            continue
        row: dict[str, Any] = {
            "subject": subject.name,
            "family": subject.family,
            "baseline": subject.baseline,
            "calls": timings.calls[subject.name],
            "milliseconds": round(quartiles(seconds)[1] * 1e3, 4),
        }
        if subject.name in timings.peaks:
            row["peak_bytes"] = timings.peaks[subject.name]
        for name, other in (("ratio", subject.baseline), ("to_bare", BARE), ("to_stock", STOCK)):
            if timings.seconds.get(other):
                row[name] = ratio(seconds, timings.seconds[other]).to_dict()
        rows.append(row | {"rounds": [round(one * 1e3, 4) for one in seconds]})
    return rows


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchmarkError(
            f"{path} cannot be read ({error}): it was changed since it was written. Remove it or pass --overwrite, and "
            "everything is measured anew."
        ) from error
    if not isinstance(found, dict) or not {"machine", "settings", "cells", "memory"} <= set(found):
        raise BenchmarkError(f"{path} does not hold results of this benchmark. Choose another --output_dir.")
    return found


def _check_equal(found: Any, now: Any, meaning: str, path: Path) -> None:
    if found == now:
        return
    different = [
        f"{name} {found.get(name)!r} there, {now.get(name)!r} here"
        for name in sorted({*found, *now})
        if found.get(name) != now.get(name)
    ]
    raise BenchmarkError(
        f"{path} was measured with {meaning} ({'; '.join(different)}), and ratios are only comparable within one. "
        "Choose another --output_dir, or pass --overwrite to measure everything anew."
    )
