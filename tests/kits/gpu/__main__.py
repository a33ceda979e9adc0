"""`python -m tests.kits.gpu`: see `tests.kits.gpu`. It has to start on a machine that lacks torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from tests.kits.gpu.rows import CRASHED, STARTED, WRONG, PartFile

PARTS = ("correctness", "launches", "price", "study")
#: Parts that time nothing, so that several workers may share them.
_SHARED = ("correctness", "launches")
#: Without these nothing runs.
_REQUIRED = ("torch", "transformers", "accelerate", "safetensors", "pydantic")
_WORKER = (sys.executable, "-m", "tests.kits.gpu.worker")
#: Exit statuses of a worker: it has told the reason why nothing can be run; it asks for another process.
FATAL, RESTART = 2, 75
_POLL_SECONDS = 0.05


def main(arguments: list[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit status: 0; 1 if a result is wrong or a cell crashed; 2 for what cannot be run; 130 if interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = parse_options(words)
    missing = [package for package in _REQUIRED if not importlib.util.find_spec(package)]
    if missing:
        print(f"gpu: not installed: {', '.join(missing)}. Run: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "-m", "tests.kits.gpu", *words])
        for part in PARTS:
            if part in options.parts:
                run_part(part, options, command)
    except (BenchmarkError, OSError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again to go on with the next cell.", file=sys.stderr)
        return 130
    from tests.kits.gpu.table import format_kit

    files = {part: PartFile(options.output_dir / f"{part}.jsonl") for part in PARTS}
    text = format_kit({part: file for part, file in files.items() if file.headers})
    (options.output_dir / "table.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"Written to {options.output_dir}: a file of rows for each part, table.md.", file=sys.stderr)
    return int(any(row["status"] in (WRONG, CRASHED) for file in files.values() for row in file.rows.values()))


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; exits with status 2 and a sentence for what cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kits.gpu",
        description="Is the library right on this GPU, what does it launch, what does it cost, and a small study.",
        epilog="Run the same command again to go on where a part was stopped.",
    )
    add = parser.add_argument
    add("--output_dir", type=Path, help="default: docs/results/gpu, and outputs/gpu_smoke in a smoke run")
    add("--parts", choices=PARTS, nargs="+", default=PARTS, help="default: all")
    add("--smoke", action="store_true", help="every part at a tiny size, on a CPU where there is no GPU")
    add("--device", choices=("cuda", "cpu"), help="default: cuda; a smoke run takes what is there")
    add("--budget_minutes", type=float, default=8.0, help="of each part, which goes on with the next call (8)")
    add("--cell_minutes", type=float, default=4.0, help="a single cell that takes longer is ended (4)")
    add("--workers", type=int, default=1, help="processes that share the parts in which no time is taken (1)")
    add("--overwrite", action="store_true", help="forget earlier results of these parts")
    options = parser.parse_args(words)
    if not (options.budget_minutes > 0 and options.cell_minutes > 0):
        parser.error("--budget_minutes and --cell_minutes have to be above 0")
    if options.workers < 1:
        parser.error("--workers has to be at least 1")
    options.output_dir = options.output_dir or Path("outputs/gpu_smoke" if options.smoke else "docs/results/gpu")
    return options


def run_part(part: str, options: argparse.Namespace, command: str, worker: Sequence[str] = _WORKER) -> None:
    """Starts workers until the part has ended or its time is up.

    Args:
        part: one of `PARTS`.
        options: of `parse_options`.
        command: the words that repeat the run.
        worker: the command that starts a worker, to which its request is added.

    Raises:
        BenchmarkError: if there is nothing to run on, or a worker cannot even begin.
    """
    path = options.output_dir / f"{part}.jsonl"
    workers = options.workers if part in _SHARED else 1
    request: dict[str, Any] = {
        "part": part,
        "command": command,
        "path": str(path),
        "smoke": options.smoke,
        "device": options.device,
        "overwrite": options.overwrite,
        "workers": workers,
        "cell_seconds": 60 * min(options.cell_minutes, options.budget_minutes),
    }
    end = time.monotonic() + 60 * options.budget_minutes
    earlier = {number: PartFile(path, number).last for number in range(workers)}
    headers = len(PartFile(path).headers)

    def start(number: int) -> subprocess.Popen[bytes]:
        more = {"worker": number, "seconds": end - time.monotonic()}
        # A session of its own, so that what it starts ends with it.
        return subprocess.Popen([*worker, json.dumps(request | more)], start_new_session=True)

    # The first worker checks whether the file may be written; the others begin when it has.
    running, waiting = {0: start(0)}, set(range(1, workers))
    request["overwrite"] = False
    try:
        while running:
            if waiting and len(PartFile(path).headers) != headers:
                running |= {number: start(number) for number in waiting}
                waiting = set()
            for number in [number for number, process in running.items() if process.poll() is not None]:
                process = running.pop(number)
                _end(process)
                again = _settle(process.returncode, PartFile(path, number), earlier[number], request)
                earlier[number] = PartFile(path, number).last
                if again and time.monotonic() < end:
                    running[number] = start(number)
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            _end(process)
    if left := PartFile(path).left:
        print(f"{part}: {len(left)} cells are left; the same command goes on with them.", file=sys.stderr)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a worker and what it has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _settle(status: int, file: PartFile, earlier: dict[str, Any], request: dict[str, Any]) -> bool:
    """Writes a row for the cell in which a worker ended. Returns whether another worker has to go on.

    Args:
        status: its exit status; negative for a signal.
        file: of the part, for the lines of this worker.
        earlier: the last of these lines before it began.
        request: what all workers were given.

    Raises:
        BenchmarkError: if the worker could not begin.
    """
    if status == 0:
        return False
    if status == FATAL:
        raise BenchmarkError(f"the part {request['part']!r} cannot be run; the reason is above.")
    last = file.last
    if last.get("status") == STARTED and last != earlier:
        reason = f"the process ended with {f'signal {-status}' if status < 0 else f'exit status {status}'}"
        if status == 1:
            # The alarm of the worker.
            if last["cut_short"]:
                return False
            reason = f"it did not end within {request['cell_seconds']:g} s"
        print(f"  {CRASHED:8} {last['cell']}: {reason}", file=sys.stderr)
        file.add({"cell": last["cell"], "status": CRASHED, "reason": reason})
    elif status != RESTART:
        raise BenchmarkError(
            f"The worker process ended with status {status} before it began a cell; its messages are above."
        )
    return True


if __name__ == "__main__":
    sys.exit(main())
