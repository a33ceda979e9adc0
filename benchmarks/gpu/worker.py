"""The process that computes. On standard output it tells its supervisor what it begins and what came out.

A GPU that was left in an error state by one cell fails every later call of the process, so the worker then leaves with
`RESTART`, and another one goes on.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import CRASHED, REFUSED, OutOfTimeError, Part, Row, Setup

#: Begins every line that is meant for the supervisor; whatever else is printed is passed on to the terminal.
MARK = "\x1e"
RESTART = 75
FATAL = 2


def main(arguments: list[str]) -> int:
    """Runs what the one argument, a JSON object, asks for. Returns the exit status."""
    request = json.loads(arguments[0])
    from benchmarks.errors import BenchmarkError

    try:
        device = _device(request["device"], request["smoke"])
        describe(device)
        for name in request["parts"]:
            if not _run_part(name, device, request):
                return RESTART
    except BenchmarkError as error:
        tell(event="fatal", reason=str(error))
        return FATAL
    return 0


def tell(**words: Any) -> None:
    """One line for the supervisor."""
    print(f"{MARK}{json.dumps(words)}", flush=True)


def describe(device: str) -> None:
    """Tells the machine, and how slow its processor is with subnormal numbers."""
    from benchmarks.gpu.requirements import missing_optional
    from benchmarks.machine import describe_machine
    from benchmarks.subnormals import subnormal_ratio

    machine = describe_machine(device) | {"device": device}
    tell(event="machine", machine=machine, subnormals=round(subnormal_ratio(), 2), missing=missing_optional(device))


def build_part(name: str, setup: Setup) -> Part:
    """One of `PARTS`."""
    if name == "correctness":
        from benchmarks.gpu.correctness import Correctness

        return Correctness(setup)
    if name == "price":
        from benchmarks.gpu.price import Price

        return Price(setup)
    from benchmarks.gpu.study import Study

    return Study(setup)


def run_cells(part: Part, rows: dict[str, Row], remaining: Callable[[], float], device: str) -> bool:
    """Runs the cells that have no row, while there is time. Returns whether the device still works."""
    longest = 0.0
    for cell in part.cells():
        if cell in rows:
            continue
        # The longest one so far says what the next one may take; nothing that is begun should have to be ended.
        if remaining() < longest:
            break
        start = time.monotonic()
        tell(event="begin", cell=cell)
        try:
            row = part.run(cell)
        except OutOfTimeError:
            tell(event="paused", cell=cell)
            break
        # Whatever it is, it is told in the results, and the next cell is run.
        except Exception as error:
            row = failed_row(error)
        longest = max(longest, time.monotonic() - start)
        rows[cell] = row | {"seconds": round(time.monotonic() - start, 2)}
        tell(event="row", cell=cell, row=rows[cell])
        if not device_works(device):
            return False
    return True


def failed_row(error: Exception) -> Row:
    """A refusal of the library with its reason, or a crash with the last lines of its traceback."""
    from hf_posenc import PositionEncodingError

    if isinstance(error, PositionEncodingError):
        return {"status": REFUSED, "reason": str(error)}
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f"{Path(last.filename).name}:{last.lineno} in {last.name}" if last else "nowhere"
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    return {"status": CRASHED, "reason": f"{type(error).__name__}: {lines[0][:400]}", "where": where}


def device_works(device: str) -> bool:
    """Whether a GPU still answers: an illegal access makes every later call of a process fail."""
    if device != "cuda":
        return True
    import torch

    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:
        return False


def _device(wanted: str | None, smoke: bool) -> str:
    import torch

    from benchmarks.machine import check_device

    if wanted is None and smoke and not torch.cuda.is_available():
        return "cpu"
    check_device(wanted or "cuda")
    return wanted or "cuda"


def _run_part(name: str, device: str, request: dict[str, Any]) -> bool:
    end = time.monotonic() + request["seconds"][name]

    def remaining() -> float:
        return end - time.monotonic()

    path = Path(request["results"])
    known = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.is_file() else {}
    rows: dict[str, Row] = {} if name in request["forgotten"] else dict(known.get(name, {}).get("rows", {}))
    setup = Setup(device, request["smoke"], path.parent, rows, remaining)
    part = build_part(name, setup)
    # Timing collects garbage before each round, and accelerate at each tensor it places. Neither has to look through
    # all of torch's objects.
    gc.collect()
    gc.freeze()
    tell(event="part", part=name, settings=part.settings(), cells=part.cells())
    works = run_cells(part, rows, remaining, device)
    if works:
        tell(event="end", part=name)
    return works


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
