"""Runs the cells of a part in separate processes, and writes a row for each."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
import traceback
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import check_device, describe_machine, subnormal_ratio
from benchmarks.price import check_same
from hf_posenc import PositionEncodingError
from tests.kits.gpu.rows import CRASHED, REFUSED, PartFile, Row
from tests.processes import each

#: What needs them is left out where they are missing: FlashAttention, and everything compiled.
_OPTIONAL = ("flash_attn", "triton")
#: Cells of one process. Neighbours share a model and its reference.
_BLOCK = 16


@dataclass(frozen=True)
class Part:
    """One of the parts of the kit.

    Args:
        smoke: whether everything is so small that a CPU runs it in seconds.
    """

    device: str
    smoke: bool

    def settings(self) -> dict[str, Any]:
        """What all rows of the part depend on, JSON-ready; rows of other settings are refused."""
        raise NotImplementedError

    def cells(self) -> list[str]:
        """All cells, the most important ones first."""
        raise NotImplementedError

    def run(self, cell: str) -> Row:
        """Runs one of them, with a `status` in its row. Whatever it raises is recorded as a crash."""
        raise NotImplementedError


@dataclass(frozen=True)
class Block:
    """Cells that one process runs.

    Args:
        end: the clock after which none is begun.
        seconds: after the first one, time in which others are begun.
    """

    part: Part
    cells: tuple[str, ...]
    end: float
    seconds: float

    def run(self) -> dict[str, Row]:
        """The rows of the cells that were run: not those for which the time or the device did not suffice."""
        rows: dict[str, Row] = {}
        end = min(self.end, time.time() + self.seconds)
        for cell in self.cells:
            if time.time() >= end:
                break
            start = time.monotonic()
            try:
                row = self.part.run(cell)
            # Any error is recorded in the results, and the next cell is run.
            except Exception as error:
                row = _failed(error)
            rows[cell] = row | {"cell": cell, "seconds": round(time.monotonic() - start, 2)}
            if not _device_works(self.part.device):
                break
        return rows


def run_part(name: str, options: Namespace, command: str) -> None:
    """Runs the cells of a part that have no row yet, until its time is up.

    Raises:
        BenchmarkError: if the device does not exist, or the file was begun on another machine, with other code of the
            library or with other settings. The file is then as it was.
    """
    device = options.device or ("cpu" if options.smoke and not torch.cuda.is_available() else "cuda")
    check_device(device)
    part = getattr(importlib.import_module(f"tests.kits.gpu.{name}"), name.capitalize())(device, options.smoke)
    file = PartFile(options.output_dir / f"{name}.jsonl")
    header = {
        "machine": describe_machine(device),
        "settings": part.settings() | {"device": device, "smoke": options.smoke},
        "cells": part.cells(),
        "subnormals": round(subnormal_ratio(), 2),
        "missing": [package for package in _OPTIONAL if not importlib.util.find_spec(package)],
        "command": command,
    }
    if options.overwrite:
        file.clear()
    for earlier in file.headers[:1]:
        for kind in ("machine", "settings"):
            # Through JSON, as what was read.
            check_same(earlier[kind], json.loads(json.dumps(header[kind])), kind, file.path)
    file.add(header)
    print(f"{name}: {len(file.left)} of {len(header['cells'])} cells are left", file=sys.stderr)
    run_cells(part, file, options.workers, 60 * options.budget_minutes, 60 * options.cell_minutes)
    if file.left:
        print(f"{name}: {len(file.left)} cells are left; the same command goes on with them.", file=sys.stderr)


def run_cells(part: Part, file: PartFile, workers: int, seconds: float, cell_seconds: float) -> None:
    """Runs the cells without a row: first many in a process, then those of processes that ended early one by one.

    Args:
        workers: processes at a time.
        seconds: after which no cell is begun.
        cell_seconds: after which a cell hangs.
    """
    end = time.time() + seconds
    for size in (_BLOCK, 1):
        left = file.left
        starts = range(0, len(left), size)
        blocks = [Block(part, tuple(left[start : start + size]), end, cell_seconds / 2) for start in starts]
        for block, rows, died in each(
            Block.run, blocks, processes=workers, timeout=cell_seconds, preload=type(part).__module__
        ):
            if died and size == 1:
                rows = {block.cells[0]: {"cell": block.cells[0], "status": CRASHED, "reason": died}}
            for cell, row in (rows or {}).items():
                file.add(row)
                print(f"  {row['status']:8} {cell} {row.get('reason', '')[:160]}", file=sys.stderr, flush=True)


def _failed(error: Exception) -> Row:
    """A refusal of the library with its reason, or a crash with the first line of its message and its place."""
    if isinstance(error, PositionEncodingError):
        return {"status": REFUSED, "reason": str(error)}
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = (str(error).strip().splitlines() or [""])[0]
    where = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
    return {"status": CRASHED, "reason": f"{type(error).__name__}: {message[:400]} ({where})"}


def _device_works(device: str) -> bool:
    """Whether a GPU still answers: an illegal access makes every later call of a process fail."""
    try:
        return device != "cuda" or bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:
        return False
