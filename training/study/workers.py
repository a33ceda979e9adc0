"""Several trainings at the same time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from training.study.cells import FAILED, Cell
from training.study.run import run_cell
from training.study.settings import usable_cores
from training.trainer import TrainingError


def run_cells(
    cells: list[Cell], workers: int, on_step: Callable[[str, int], None]
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Runs the trainings, and yields each with its result as soon as it has ended.

    Args:
        cells: what is trained, in this order where several could be next. One that starts from another comes after it,
            and waits until that one has ended.
        workers: trainings at a time, each in a process with its share of the cores, and on a GPU of its own if there
            is one; 1 runs one after the other in this process.
        on_step: told of every step, if the trainings run in this process.

    Raises:
        TrainingError: if a worker process was killed, for example because the memory was full.
    """
    if workers <= 1:
        for cell in cells:
            yield cell, _guarded(cell, partial(on_step, cell.name))
        return
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(workers):
        numbers.put(number)
    threads = max(1, usable_cores() // workers)
    with ProcessPoolExecutor(workers, context, _start_worker, (numbers, threads)) as pool:
        waiting, running = list(cells), dict[Future[dict[str, Any]], Cell]()
        try:
            while waiting or running:
                for cell in _ready(waiting, running.values())[: workers - len(running)]:
                    waiting.remove(cell)
                    running[pool.submit(_guarded, cell)] = cell
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise TrainingError(
                "A worker process was killed from outside; on a small machine the usual cause is memory. What it had "
                "saved is kept: run the same command again to go on from there, perhaps with a lower --workers."
            ) from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _ready(waiting: list[Cell], running: Iterable[Cell]) -> list[Cell]:
    """The waiting trainings whose start has ended."""
    open_cells = {cell.name for cell in (*waiting, *running)}
    return [cell for cell in waiting if cell.start is None or cell.start.name not in open_cells]


def quiet() -> None:
    """Leaves the terminal to the study's own progress bar."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _start_worker(numbers: Any, threads: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(numbers.get() % torch.cuda.device_count())
    # Ctrl-C reaches the whole group of processes; the main one terminates the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    quiet()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _guarded(cell: Cell, on_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """The training's result; an unexpected error becomes a result too, so that the other trainings go on."""
    try:
        return run_cell(cell, on_step)
    except Exception as error:
        return cell.head() | {
            "status": FAILED,
            "reason": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
