"""Runs the parts in a worker process and keeps what it tells; where it crashes or hangs, another one goes on.

Nothing here needs torch, so that a machine without it is told what is missing.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.gpu.arguments import Options
from benchmarks.gpu.part import CRASHED
from benchmarks.gpu.store import Store, cells_left
from benchmarks.gpu.worker import MARK, RESTART

#: A worker ends by itself when the time of a part is up; it is ended so many seconds later.
_GRACE = 20.0
#: A cell that had this share of the time of a whole part, and did not end within it, never will.
_ENOUGH = 0.5

Tell = Callable[[str], None]
_WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")


class Supervisor:
    """Runs the parts of one call.

    Args:
        options: what is run.
        store: where rows go.
        tell: prints a line for whoever watches.
        worker: the command that starts a worker, to which its request is added.
    """

    def __init__(self, options: Options, store: Store, tell: Tell, worker: Sequence[str] = _WORKER) -> None:
        self.options, self.store, self.tell, self.worker = options, store, tell, worker
        self.parts = list(options.parts)
        self.seconds = dict.fromkeys(options.parts, options.budget_seconds)
        self.machine: dict[str, Any] = {}
        self.part: str | None = None
        self.cell: str | None = None
        self.part_began = self.cell_began = 0.0
        #: A worker that comes to nothing twice in a row would do so for ever.
        self.idle_workers = 0

    def run(self) -> None:
        """Starts workers until every part has ended or its time is up.

        Raises:
            BenchmarkError: if there is nothing to run on, or a worker cannot even begin.
        """
        while self.parts:
            status = self._one_worker()
            self._end_part_time()
            if status == 0:
                break
            if self.cell is not None:
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                self._crashed(f"the process ended with {how} in the middle of this cell")
            elif status != RESTART:
                self.idle_workers += 1
            if self.idle_workers > 1:
                raise BenchmarkError(
                    f"The worker process ended with status {status} before it began a cell; its messages are above."
                )
        self.store.save()

    def _one_worker(self) -> int:
        request = {
            "parts": self.parts,
            "seconds": self.seconds,
            "smoke": self.options.smoke,
            "device": self.options.device,
            "results": str(self.store.path),
            "forgotten": sorted(self.store.forgotten),
        }
        self.store.save()
        command = [*self.worker, json.dumps(request)]
        # A session of its own, so that what it starts ends with it.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        try:
            while True:
                try:
                    line = lines.get(timeout=0.5)
                except queue.Empty:
                    if self._overdue():
                        _end(process)
                        return RESTART
                    continue
                if line is None:
                    return process.wait()
                if line.startswith(MARK):
                    self._hear(json.loads(line[len(MARK) :]))
                else:
                    self.tell(line.rstrip("\n"))
        finally:
            _end(process)

    def _hear(self, words: dict[str, Any]) -> None:
        event = words["event"]
        if event == "fatal":
            raise BenchmarkError(words["reason"])
        if event == "machine":
            self.machine = words["machine"]
            self.store.content |= {"subnormals": words["subnormals"], "missing": words["missing"]}
            for package, reason in words["missing"].items():
                self.tell(f"{package} is not installed: {reason}")
        elif event == "part":
            self.part, self.part_began = words["part"], time.monotonic()
            self.store.begin(words["part"], self.machine, words["settings"], words["cells"])
            done = len(words["cells"]) - len(cells_left(self.store.content["parts"][words["part"]]))
            self.tell(f"{words['part']}: {done} of {len(words['cells'])} cells are done")
        elif event == "begin":
            self.cell, self.cell_began = words["cell"], time.monotonic()
            self.idle_workers = 0
        elif event == "row":
            self._keep(words["cell"], words["row"])
        elif event == "paused":
            self.cell = None
        elif event == "end":
            self._end_part()

    def _keep(self, cell: str, row: dict[str, Any]) -> None:
        assert self.part is not None
        self.store.add(self.part, cell, row)
        self.cell = None
        reason = row.get("reason", "")
        self.tell(f"  {row['status']:8} {cell} ({row['seconds']:.1f} s){': ' + reason[:160] if reason else ''}")

    def _crashed(self, reason: str) -> None:
        assert self.cell is not None
        seconds = round(time.monotonic() - self.cell_began, 2)
        self._keep(self.cell, {"status": CRASHED, "reason": reason, "seconds": seconds})

    def _overdue(self) -> bool:
        """Whether the worker has to be ended: a cell hangs, or the time of the part is up."""
        now = time.monotonic()
        if self.part is None:
            return False
        if self.cell is not None and now - self.cell_began > self.options.cell_seconds and self.part != "study":
            self._crashed(f"it did not end within {self.options.cell_seconds:.0f} s")
            return True
        if now - self.part_began <= self.seconds[self.part] + _GRACE:
            return False
        if self.cell is not None and self.part != "study":
            taken = now - self.cell_began
            if taken > _ENOUGH * self.options.budget_seconds:
                self._crashed(f"it did not end within the {taken:.0f} s that were left to its part")
        self.cell = None
        self._end_part()
        return True

    def _end_part_time(self) -> None:
        """What a worker took of the time of the part it was in is gone for the next one."""
        if self.part is not None:
            self.seconds[self.part] -= time.monotonic() - self.part_began
            self.part_began = time.monotonic()

    def _end_part(self) -> None:
        assert self.part is not None
        left = len(cells_left(self.store.content["parts"][self.part]))
        if left:
            self.tell(f"{self.part}: the time is up, {left} cells are left; the same command goes on with them.")
        self.parts.remove(self.part)
        self.part = None
        self.store.save()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the worker and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
