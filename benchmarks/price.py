"""Measures the cost of each position encoding, compared with the same model without any.

    python -m benchmarks.price --output_dir docs/results/price
    python -m benchmarks.price --quick
    python -m benchmarks.price --device cuda --dtype bfloat16 --lengths 4096 16384

In every round, each subject runs once, in random order. A ratio is the median over rounds of a subject's time divided
by that of the bare model in the same round. The output folder gets `results.json`, `table.md` and `price.png`. Run the
same command again to continue an interrupted run.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arguments import parse_options, subjects_of
from benchmarks.errors import BenchmarkError
from benchmarks.figure import draw_price
from benchmarks.levels import DECODERS
from benchmarks.lineup import build_lineup
from benchmarks.machine import describe_machine, subnormal_ratio
from benchmarks.memory import memory_requests, peak_memory
from benchmarks.subjects import BARE, DECODING
from benchmarks.table import price_result, write_tables
from benchmarks.timing import time_subjects
from training.files import write_json, write_text

#: Level, phase and length.
Cell = tuple[str, str, int]


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 if something cannot be measured."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse_options(words)
    try:
        content = measure(options, shlex.join(["python", "-m", "benchmarks.price", *words]))
        write_outputs(content, options.output_dir)
    except (BenchmarkError, OSError) as error:
        remedy = ". Choose another --output_dir, or free some space or change permissions there."
        print(f"price: {error}{'' if isinstance(error, BenchmarkError) else remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again to continue with the next cell.", file=sys.stderr)
        return 130
    return 0


def measure(options: Namespace, command: str) -> dict[str, Any]:
    """Adds missing measurements to `results.json`, which is written after each of them. Returns its content."""
    deadline = time.monotonic() + 60 * options.budget_minutes
    path = options.output_dir / "results.json"
    machine, settings = describe_machine(options.setting.device), asdict(options.setting) | {"batch_size": 1}
    content: dict[str, Any] = {"machine": machine, "settings": settings, "commands": [], "cells": {}, "memory": {}}
    if path.exists() and not options.overwrite:
        content = _earlier(path, content)
    if command not in content["commands"]:
        content["commands"].append(command)
    content.setdefault("subnormals", round(subnormal_ratio(), 2))
    cells = {" ".join(map(str, cell)): cell for cell in planned_cells(options)}
    requests = {_memory_name(request): request for request in memory_requests(options)}
    left = [key for key, cell in cells.items() if content["cells"].get(key, {}).get("asked") != _asked(options, cell)]
    left += [key for key in requests if key not in content["memory"]]
    total = len(left)
    while left and time.monotonic() < deadline:
        key = left[0]
        print(f"[{total - len(left) + 1}/{total}] {key}", file=sys.stderr, flush=True)
        if key in cells:
            content["cells"][key] = measure_cell(options, cells[key], content["cells"], deadline)
        else:
            content["memory"][key] = requests[key] | peak_memory(requests[key], options.setting)
        left.pop(0)
        write_json(path, content | {"not_begun": left})
    content["not_begun"] = left
    write_json(path, content)
    if left:
        print(f"{len(left)} measurements were not started; run the same command again to continue.", file=sys.stderr)
    return content


def planned_cells(options: Namespace) -> list[Cell]:
    """Returns level, phase and length of each cell, short ones first, because they predict the time of long ones."""
    return [
        (level, phase, length)
        for length in sorted(set(options.lengths))
        for level in options.levels
        for phase in options.phases
        if phase not in DECODING or level in DECODERS
    ]


def measure_cell(
    options: Namespace, cell: Cell, earlier: Mapping[str, dict[str, Any]], deadline: float = math.inf
) -> dict[str, Any]:
    """Times all subjects of one cell, see `time_subjects`."""
    level, phase, length = cell
    asked = _asked(options, cell)
    place: dict[str, Any] = {"level": level, "phase": phase, "length": length, "asked": asked}
    slow = _too_slow(options, cell, earlier)
    if BARE in slow:
        return place | {"rounds": 0, "rows": [], "left_out": slow, "lasting": sorted(slow)}
    names = [name for name in asked["subjects"] if name not in slow]
    subjects, missing = build_lineup(level, names, asked["peers"], length, options.setting)
    subjects = [subject for subject in subjects if subject.name not in slow and subject.baseline not in slow]
    try:
        timings = time_subjects(subjects, phase, length, options.pace, options.setting.device, deadline)
    finally:
        for subject in subjects:
            subject.close()
    now = {
        name: f"from {length} tokens on: {reason}" if name in timings["lasting"] else reason
        for name, reason in timings["left_out"].items()
    }
    timings |= {"left_out": missing | slow | now, "lasting": sorted({*slow, *timings["lasting"]})}
    return place | timings


def write_outputs(content: dict[str, Any], folder: Path) -> None:
    """Writes the table and the figure, and prints the table."""
    text = write_tables(content)
    write_text(folder / "table.md", text)
    print(text)
    drawn = [path.name for path in draw_price(price_result(content), folder)]
    print(f"Written to {folder}: {', '.join(['results.json', 'table.md', *drawn])}.", file=sys.stderr)


def _earlier(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a results file, if this run may add to it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchmarkError(
            f"{path} cannot be read ({error}): it was changed after it was written. Remove it or pass --overwrite to "
            "measure everything again."
        ) from error
    if not isinstance(content, dict) or not fresh.keys() <= content.keys():
        raise BenchmarkError(f"{path} does not contain results of this benchmark. Choose another --output_dir.")
    for kind in ("machine", "settings"):
        check_same(content[kind], fresh[kind], kind, path)
    return content


def check_same(earlier: dict[str, Any], now: dict[str, Any], kind: str, path: Path) -> None:
    """Raises if earlier results cannot be compared with those of this run."""
    names = sorted(name for name in {*earlier, *now} if earlier.get(name) != now.get(name))
    if names:
        told = "; ".join(f"{name} {earlier.get(name)!r} there, {now.get(name)!r} here" for name in names)
        raise BenchmarkError(
            f"{path} was started with another {kind} ({told}), but figures are only comparable with the same {kind}. "
            "Choose another --output_dir, or pass --overwrite to measure everything again."
        )


def _asked(options: Namespace, cell: Cell) -> dict[str, Any]:
    """Returns the settings that must be unchanged to reuse a cell."""
    return {
        "subjects": subjects_of(options, cell[0]),
        "peers": list(options.peers) if cell[0] == "attention" else [],
        "pace": asdict(options.pace),
    }


def _memory_name(request: dict[str, Any]) -> str:
    return f"{request['level']} {request['phase']} {request['length']} {request['subject']}"


def _too_slow(options: Namespace, cell: Cell, earlier: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Returns reasons, by subject, to skip it: too slow or too large, judging by the next shorter length.

    No scheme grows faster than the square of the length.
    """
    level, phase, length = cell
    shorter = [other for other in sorted(options.lengths) if other < length]
    before = earlier.get(f"{level} {phase} {shorter[-1]}") if shorter else None
    if before is None:
        return {}
    growth = (length / before["length"]) ** (1 if phase in DECODING else 2)
    reasons = {name: before["left_out"][name] for name in before["lasting"]}
    for row in before["rows"]:
        reason = options.pace.too_slow(row["milliseconds"] / 1e3 * growth)
        if reason is not None:
            reasons[row["subject"]] = f"from {length} tokens on: {reason}, to judge by {before['length']} tokens"
    return reasons


if __name__ == "__main__":
    sys.exit(main())
