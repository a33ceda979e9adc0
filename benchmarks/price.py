"""Measures what each position encoding costs over the same model without any.

    python -m benchmarks.price --output_dir docs/results/price
    python -m benchmarks.price --quick
    python -m benchmarks.price --device cuda --dtype bfloat16 --lengths 4096 16384

In every round each subject runs once, in random order, and a ratio is the median over rounds of a subject's time over
that of the bare model in the same round. The output folder gets `results.json`, `table.md` and `price.png`. Run the
same command again to go on where a run was stopped.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arguments import Options, parse_options
from benchmarks.errors import BenchmarkError
from benchmarks.figure import draw_price
from benchmarks.lineup import BARE, DECODERS, build_lineup
from benchmarks.machine import describe_machine
from benchmarks.memory import MemoryRequest, memory_requests, peak_memory
from benchmarks.results import Book, cell_key, cell_rows, memory_key
from benchmarks.store import write_text
from benchmarks.subjects import decodes
from benchmarks.subnormals import subnormal_ratio
from benchmarks.table import price_result, write_tables
from benchmarks.timing import time_subjects

Cell = tuple[str, str, int]


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 for what cannot be measured."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse_options(words)
    try:
        book = measure(options, shlex.join(["python", "-m", "benchmarks.price", *_repeating(words)]))
    except BenchmarkError as error:
        print(f"price: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again to go on with the next cell.", file=sys.stderr)
        return 130
    write_outputs(book, options.output_dir)
    return 0


def measure(options: Options, command: str) -> Book:
    """Measures what is missing in `results.json`, which is written after every cell.

    Args:
        options: what and where.
        command: the words that repeat it.

    Raises:
        BenchmarkError: if earlier results in the folder are of another machine, or the bare model cannot be run.
    """
    deadline = time.monotonic() + options.budget_seconds
    settings = asdict(options.setting) | {"batch_size": 1}
    book = Book(
        options.output_dir / "results.json",
        describe_machine(options.setting.device),
        settings,
        overwrite=options.overwrite,
    )
    book.note_command(command)
    book.content.setdefault("subnormals", round(subnormal_ratio(), 2))
    cells, requests = planned_cells(options), memory_requests(options)
    for number, cell in enumerate(cells, start=1):
        key = cell_key(*cell)
        if book.finished(key, _asked(options, cell)):
            continue
        if time.monotonic() > deadline:
            break
        start = time.monotonic()
        _tell(f"[{number}/{len(cells)}] {key} ...")
        book.cells[key] = measure_cell(options, cell, book.cells, deadline)
        book.save()
        found = book.cells[key]
        _tell(f"    {len(found['rows'])} subjects, {found['rounds']} rounds, {time.monotonic() - start:.0f} s")
    for number, request in enumerate(requests, start=1):
        key = memory_key(request.level, request.subject, request.phase, request.length)
        if key in book.memory:
            continue
        if time.monotonic() > deadline:
            break
        _tell(f"[memory {number}/{len(requests)}] {key}")
        book.memory[key] = _measure_memory(options, request)
        book.save()
    _note_missing(book, options, cells, requests)
    book.save()
    return book


def planned_cells(options: Options) -> list[Cell]:
    """Level, phase and length of each cell, short ones first, since the time of long ones is foretold from them."""
    return [
        (level, phase, length)
        for length in options.lengths
        for level in options.levels
        for phase in options.phases
        if not decodes(phase) or level in DECODERS
    ]


def write_outputs(book: Book, folder: Path) -> None:
    """Writes table and figure, and prints the table."""
    text = write_tables(book.content)
    write_text(folder / "table.md", text)
    print(text)
    drawn = draw_price(price_result(book.content), folder)
    _tell(f"Written to {folder}: results.json, table.md{', price.png' if drawn else ''}.")


def _asked(options: Options, cell: Cell) -> dict[str, Any]:
    """What has to be the same for a cell not to be measured again."""
    level = cell[0]
    return {
        "subjects": list(options.subjects_of(level)),
        "peers": list(options.peers) if level == "attention" else [],
        "pace": asdict(options.pace),
    }


def measure_cell(
    options: Options, cell: Cell, earlier: Mapping[str, dict[str, Any]], deadline: float = math.inf
) -> dict[str, Any]:
    """Times all subjects of one cell.

    Args:
        options: what and where.
        cell: level, phase and length.
        earlier: cells that were measured, by `cell_key`; shorter lengths tell what would take too long.
        deadline: of `time.monotonic()`; no more rounds are added after it, once there are three.

    Raises:
        BenchmarkError: if the bare model cannot be run.
    """
    level, phase, length = cell
    asked = _asked(options, cell)
    slow = _foretold(options, cell, earlier)
    found: dict[str, Any] = {"level": level, "phase": phase, "length": length, "asked": asked}
    if BARE in slow:
        return found | {"rounds": 0, "rows": [], "left_out": slow, "lasting": sorted(slow)}
    names = [name for name in asked["subjects"] if name not in slow]
    lineup = build_lineup(level, names, asked["peers"], length, options.setting)
    subjects = [subject for subject in lineup.subjects if subject.name not in slow and subject.baseline not in slow]
    timings = time_subjects(subjects, phase, length, options.pace, options.setting.device, deadline)
    now = {
        name: f"from {length} tokens on: {reason}" if name in timings.lasting else reason
        for name, reason in timings.left_out.items()
    }
    return found | {
        "rounds": timings.rounds,
        "rows": cell_rows(subjects, timings),
        "left_out": lineup.left_out | slow | now,
        "lasting": sorted({*slow, *timings.lasting}),
    }


def _foretold(options: Options, cell: Cell, earlier: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Reasons, by subject, not even to try: too slow or too large, as the next shorter length tells.

    No scheme grows faster than with the square of the length.
    """
    level, phase, length = cell
    shorter = [one for one in options.lengths if one < length]
    before = earlier.get(cell_key(level, phase, shorter[-1])) if shorter else None
    if before is None:
        return {}
    growth = (length / before["length"]) ** (1 if decodes(phase) else 2)
    reasons = {name: before["left_out"][name] for name in before["lasting"]}
    for row in before["rows"]:
        reason = options.pace.too_slow(row["milliseconds"] / 1e3 * growth)
        if reason is not None:
            reasons[row["subject"]] = f"from {length} tokens on: {reason}, to judge by {before['length']} tokens"
    return reasons


def _measure_memory(options: Options, request: MemoryRequest) -> dict[str, Any]:
    found = peak_memory(
        request.level, request.subject, request.phase, request.length, options.setting, peers=request.peers
    )
    described = {"level": request.level, "subject": request.subject, "phase": request.phase, "length": request.length}
    return described | found


def _note_missing(book: Book, options: Options, cells: list[Cell], requests: list[MemoryRequest]) -> None:
    missing = [cell_key(*cell) for cell in cells if not book.finished(cell_key(*cell), _asked(options, cell))]
    keys = [memory_key(one.level, one.subject, one.phase, one.length) for one in requests]
    missing += [f"memory of {key}" for key in keys if key not in book.memory]
    book.content["not_begun"] = missing
    if missing:
        _tell(
            f"{len(missing)} measurements were not begun within --budget_minutes; the same command goes on with them."
        )


def _repeating(words: list[str]) -> list[str]:
    """The words without where the results go and how long it may take, which say nothing about the figures."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        flag = word.partition("=")[0]
        if flag in ("--output_dir", "--budget_minutes"):
            skip = "=" not in word
        elif flag != "--overwrite":
            kept.append(word)
    return kept


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
