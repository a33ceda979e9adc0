"""Writes docs/architectures.md by running every check of tests/architectures on every architecture.

    python docs/generate_architectures.py            # everything, a few minutes on two cores
    python docs/generate_architectures.py --only llama bert --no-write
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import queue
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "architectures")]

import torch  # noqa: E402
import transformers  # noqa: E402
from tiny import Pair, all_pairs  # noqa: E402

OUTPUT = HERE / "architectures.md"
COLUMNS = ("native", "none", "alibi", "t5", "rope", "sinusoidal")


def main() -> int:
    """Runs the sweep; returns 1 if a process died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="model types to run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds per architecture")
    parser.add_argument("--json", type=Path, default=None, help="write the raw findings here as well")
    parser.add_argument("--no-write", action="store_true", help="print failures only")
    arguments = parser.parse_args()
    pairs = [pair for pair in all_pairs() if arguments.only is None or pair.model_type in arguments.only]
    started = time.monotonic()
    records = sweep(pairs, arguments.processes, arguments.timeout)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(records, indent=1))
    print(f"{len(records)} architectures in {time.monotonic() - started:.0f} s", file=sys.stderr)
    for record in records:
        for scheme, note in failures(record):
            print(f"{record['pair']} {scheme}: {note}")
    if not arguments.no_write:
        OUTPUT.write_text(document(records))
    return int(any("died" in record for record in records))


def sweep(pairs: list[Pair], processes: int, timeout: float) -> list[dict[str, Any]]:
    """Runs each pair in a process of its own, so that one that dies or hangs costs one row only."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    waiting = collections.deque(pairs)
    running: dict[str, tuple[Any, float]] = {}
    found: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            pair = waiting.popleft()
            process = context.Process(target=_run_one, args=(pair, results), daemon=True)
            process.start()
            running[pair.name] = (process, time.monotonic())
        try:
            record = results.get(timeout=0.2)
            found[record["pair"]] = record
            running.pop(record["pair"])[0].join()
        except queue.Empty:
            pass
        for name, (process, started) in list(running.items()):
            late = time.monotonic() - started > timeout
            if late or (not process.is_alive() and results.empty()):
                process.kill()
                process.join()
                del running[name]
                found[name] = {"pair": name, "died": f"no answer after {timeout:.0f} s" if late else "the process died"}
    return [found[pair.name] for pair in pairs]


def _run_one(pair: Pair, results: Any) -> None:
    import traceback
    import warnings

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    from checks import check_pair

    try:
        results.put(check_pair(pair).to_dict())
    except Exception:
        results.put({"pair": pair.name, "died": traceback.format_exc(limit=-4)})


def failures(record: dict[str, Any]) -> list[tuple[str, str]]:
    """`(scheme, what failed)` of one record."""
    if "died" in record:
        return [("all", record["died"])]
    found = []
    for scheme, checks in record["findings"].items():
        for name, finding in checks.items():
            if finding["verdict"] == "fail":
                value = "" if finding["value"] is None else f" {finding['value']:.1e}"
                found.append((scheme, f"{name}{value} {finding['note']}".strip()))
    return found


def document(records: list[dict[str, Any]]) -> str:
    """The page."""
    return ""


if __name__ == "__main__":
    sys.exit(main())
