"""`results.json`: every figure of a run, written after each cell, so that a run that was stopped can go on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lineup import BARE, STOCK
from benchmarks.store import ResultsFile, check_same
from benchmarks.subjects import Subject
from benchmarks.timing import Timings


class Book(ResultsFile):
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

    depth = 4

    def __init__(
        self, path: Path, machine: dict[str, Any], settings: dict[str, Any], *, overwrite: bool = False
    ) -> None:
        super().__init__(path, {"machine": machine, "settings": settings, "cells": {}, "memory": {}}, not overwrite)
        remedy = "Choose another --output_dir, or pass --overwrite to measure everything anew."
        for part, now in (("machine", machine), ("settings", settings)):
            check_same(self.content[part], now, part, str(path), remedy)

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
                row[name] = ratio(seconds, timings.seconds[other])
        rows.append(row | {"rounds": [round(one * 1e3, 4) for one in seconds]})
    return rows


def ratio(subject: list[float], baseline: list[float]) -> dict[str, float]:
    """A subject over its baseline in the same rounds: quartiles of the ratios, and the ratio of the fastest rounds."""
    low, median, high = quartiles([mine / other for mine, other in zip(subject, baseline, strict=True)])
    found = {"median": median, "low": low, "high": high, "of_minima": min(subject) / min(baseline)}
    return {name: round(value, 4) for name, value in found.items()}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
