"""The process that computes the cells of one part, and writes a line when each begins and ends."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.machine import check_device, describe_machine, subnormal_ratio
from benchmarks.price import check_same
from hf_posenc import PositionEncodingError
from tests.kits.gpu.__main__ import FATAL, RESTART
from tests.kits.gpu.rows import CRASHED, REFUSED, STARTED, PartFile, Row

#: What needs them is left out where they are missing: FlashAttention, everything compiled, and the test suites.
_OPTIONAL = ("flash_attn", "triton", "pytest")
#: A cell that is begun when the time of its part is almost up may take so many seconds more.
_GRACE = 20.0
_BLOCK = 16


class OutOfTimeError(Exception):
    """A cell stopped because its part's time is up; it goes on with the next call."""


@dataclass
class Part:
    """One of the parts of the kit.

    Args:
        device: "cuda" or "cpu".
        smoke: whether everything is so small that a CPU runs it in seconds.
        folder: where the results go; a part may keep files of its own below `folder / "work"`.
        rows: of this part's cells that have ended, by name, those of earlier calls included.
        remaining: seconds that are left to the part.
    """

    device: str
    smoke: bool
    folder: Path
    rows: Mapping[str, Row] = field(default_factory=dict)
    remaining: Callable[[], float] = lambda: math.inf

    def settings(self) -> dict[str, Any]:
        """What all rows of the part depend on, JSON-ready; rows of other settings are refused."""
        raise NotImplementedError

    def cells(self) -> list[str]:
        """All cells, the most important ones first."""
        raise NotImplementedError

    def run(self, cell: str) -> Row:
        """Runs one of them, with a `status` in its row. Whatever it raises is recorded as a crash.

        Raises:
            OutOfTimeError: if it goes on with the next call.
        """
        raise NotImplementedError


def main(arguments: list[str]) -> int:
    """Runs what the one argument, a JSON object, asks for. Returns the exit status."""
    request = json.loads(arguments[0])
    end = time.monotonic() + request["seconds"]
    try:
        part, file, device = prepare(request, lambda: end - time.monotonic())
    except (BenchmarkError, ValueError) as error:
        print(f"{request['part']}: {error}", file=sys.stderr)
        return FATAL
    # Timing collects garbage before each round, and accelerate at each tensor it places. Neither has to look through
    # all of torch's objects.
    gc.collect()
    gc.freeze()
    limit = math.inf if request["part"] == "study" else request["cell_seconds"]
    share = share_of(part.cells(), request["worker"], request["workers"])
    works = run_cells(part, share, file, lambda: end - time.monotonic(), device, limit)
    return 0 if works else RESTART


def prepare(request: dict[str, Any], remaining: Callable[[], float]) -> tuple[Part, PartFile, str]:
    """Builds the part, and begins its file.

    Raises:
        BenchmarkError: if the device does not exist, or the file was begun on another machine, with other code of the
            library or with other settings. The file is then as it was.
    """
    name, device = request["part"], request["device"]
    if device is None:
        device = "cpu" if request["smoke"] and not torch.cuda.is_available() else "cuda"
    check_device(device)
    file = PartFile(Path(request["path"]), request["worker"])
    if request["workers"] > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // request["workers"]))
    module = importlib.import_module(f"tests.kits.gpu.{name}")
    part = getattr(module, name.capitalize())(device, request["smoke"], file.path.parent, file.rows, remaining)
    header = {
        "machine": describe_machine(device),
        "settings": part.settings() | {"device": device, "smoke": request["smoke"]},
        "cells": part.cells(),
        "subnormals": round(subnormal_ratio(), 2),
        "missing": [package for package in _OPTIONAL if not importlib.util.find_spec(package)],
        "command": request["command"],
    }
    if request["overwrite"]:
        file.clear()
    for earlier in file.headers[:1]:
        for kind in ("machine", "settings"):
            # Through JSON, as what was read.
            check_same(earlier[kind], json.loads(json.dumps(header[kind])), kind, file.path)
    if request["worker"] == 0:
        file.add(header)
        missing = f"; not installed: {', '.join(header['missing'])}" if header["missing"] else ""
        print(f"{name}: {len(file.left)} of {len(header['cells'])} cells are left{missing}", file=sys.stderr)
    return part, file, device


def share_of(cells: Sequence[str], worker: int, workers: int) -> list[str]:
    """The cells of one of several workers, in order: blocks, since neighbours share a model and its reference."""
    return [cell for number, cell in enumerate(cells) if number // _BLOCK % workers == worker]


def run_cells(
    part: Part,
    cells: Sequence[str],
    file: PartFile,
    remaining: Callable[[], float],
    device: str,
    limit: float = math.inf,
) -> bool:
    """Runs the cells that have no row, while there is time.

    Args:
        part: whose cells they are.
        cells: those to run.
        file: where rows go.
        remaining: seconds that are left.
        device: "cuda" or "cpu".
        limit: seconds after which a cell hangs.

    Returns:
        Whether the device still works.
    """
    longest = 0.0
    for cell in cells:
        # The longest one so far says what the next one may take; nothing that is begun should have to be ended.
        if cell in file.rows:
            continue
        if remaining() < longest:
            break
        seconds = min(limit, remaining() + _GRACE)
        file.add({"cell": cell, "status": STARTED, "cut_short": seconds < limit})
        if math.isfinite(seconds):
            # Where something hangs, a thread outside of Python ends the process with status 1.
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        start = time.monotonic()
        try:
            row = part.run(cell)
        except OutOfTimeError:
            break
        # Whatever it is, it is told in the results, and the next cell is run.
        except Exception as error:
            row = failed_row(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
        taken = round(time.monotonic() - start, 2)
        longest = max(longest, taken)
        file.add(row | {"cell": cell, "seconds": taken})
        print(f"  {row['status']:8} {cell} ({taken:.1f} s) {row.get('reason', '')[:160]}", file=sys.stderr, flush=True)
        if not device_works(device):
            return False
    return True


def failed_row(error: Exception) -> Row:
    """A refusal of the library with its reason, or a crash with the first line of its message and its place."""
    if isinstance(error, PositionEncodingError):
        return {"status": REFUSED, "reason": str(error)}
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = (str(error).strip().splitlines() or [""])[0]
    where = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
    return {"status": CRASHED, "reason": f"{type(error).__name__}: {message[:400]} ({where})"}


def device_works(device: str) -> bool:
    """Whether a GPU still answers: an illegal access makes every later call of a process fail."""
    try:
        return device != "cuda" or bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
