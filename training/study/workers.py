"""Several trainings at the same time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from training.study.cells import FAILED, Cell
from training.study.run import run_cell

#: Called with the name of a cell and its number of finished steps.
Report = Callable[[str, int], None]
#: Called with a training and its result, as soon as it has ended.
OnResult = Callable[[Cell, dict[str, Any]], None]

_reports: SimpleQueue[tuple[str, int] | None] | None = None


def run_cells(cells: list[Cell], workers: int, report: Report, on_result: OnResult) -> None:
    """Runs the trainings that do not wait for each other.

    Args:
        cells: what is trained.
        workers: trainings at a time, each in a process with its share of the cores, and on a GPU of its own if there
            is one; 1 runs one after the other in this process.
        report: told of every step.
        on_result: told of every result.

    Raises:
        RuntimeError: if a worker process was killed, for example for want of memory.
    """
    if workers <= 1:
        for cell in cells:
            on_result(cell, _guarded(cell, report))
        return
    context = multiprocessing.get_context("spawn")
    queue: SimpleQueue[tuple[str, int] | None] = context.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(queue, report), daemon=True)
    listener.start()
    numbers = context.SimpleQueue()
    for number in range(workers):
        numbers.put(number)
    threads = max(1, (os.cpu_count() or 1) // workers)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (queue, numbers, threads))
    try:
        cell_of = {pool.submit(_run_in_worker, cell): cell for cell in cells}
        for future in as_completed(cell_of):
            on_result(cell_of[future], future.result())
    except BrokenProcessPool as error:
        raise RuntimeError(
            "A worker process was killed from outside; on a small machine the usual cause is memory. What it had saved "
            "is kept: run the same command again to go on from there, perhaps with a lower --workers."
        ) from error
    except KeyboardInterrupt:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        queue.put(None)
        listener.join()


def quiet() -> None:
    """Leaves the terminal to the study's own progress bar."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _listen(queue: SimpleQueue[tuple[str, int] | None], report: Report) -> None:
    while (message := queue.get()) is not None:
        report(*message)


def _start_worker(queue: SimpleQueue[tuple[str, int] | None], numbers: SimpleQueue[int], threads: int) -> None:
    global _reports
    _reports = queue
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(numbers.get() % gpus)
    # Ctrl-C reaches the whole group of processes; the main one decides what becomes of the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    quiet()


def _run_in_worker(cell: Cell) -> dict[str, Any]:
    parent = multiprocessing.parent_process()

    def report(name: str, step: int) -> None:
        if parent is not None and not parent.is_alive():
            os._exit(1)
        if _reports is not None:
            _reports.put((name, step))

    return _guarded(cell, report)


def _guarded(cell: Cell, report: Report) -> dict[str, Any]:
    """The training's result; an unexpected error becomes a result too, so that the other trainings go on."""
    try:
        return run_cell(cell, lambda step: report(cell.name, step))
    except Exception as error:
        return cell.head() | {
            "status": FAILED,
            "reason": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
