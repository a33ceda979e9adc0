"""Several trainings at the same time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch

from training.loop import FAILED, Training, run_training

#: Called with a training's name and its number of finished steps.
Report = Callable[[str, int], None]
#: Called with a training and its result, as soon as it has ended.
OnResult = Callable[[Training, dict[str, Any]], None]

_reports: SimpleQueue[tuple[str, int] | None] | None = None


def run_here(trainings: list[Training], report: Report, on_result: OnResult) -> None:
    """Runs one training after the other in this process."""
    for training in trainings:
        on_result(training, _guarded(training, report))


def run_in_workers(trainings: list[Training], workers: int, report: Report, on_result: OnResult) -> None:
    """Runs `workers` trainings at a time, each on its share of the CPU's cores.

    Raises:
        RuntimeError: if a worker process was killed, for example for want of memory.
    """
    context = multiprocessing.get_context("spawn")
    queue: SimpleQueue[tuple[str, int] | None] = context.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(queue, report), daemon=True)
    listener.start()
    threads = max(1, (os.cpu_count() or 1) // workers)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(queue, threads))
    try:
        pending: dict[Future[dict[str, Any]], Training] = {
            pool.submit(_run_in_worker, training): training for training in trainings
        }
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                on_result(pending.pop(future), future.result())
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


def _listen(queue: SimpleQueue[tuple[str, int] | None], report: Report) -> None:
    while (message := queue.get()) is not None:
        report(*message)


def _start_worker(queue: SimpleQueue[tuple[str, int] | None], threads: int) -> None:
    global _reports
    _reports = queue
    # Ctrl-C reaches the whole group of processes; the main one decides what becomes of the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _run_in_worker(training: Training) -> dict[str, Any]:
    parent = multiprocessing.parent_process()

    def report(name: str, step: int) -> None:
        if parent is not None and not parent.is_alive():
            os._exit(1)
        if _reports is not None:
            _reports.put((name, step))

    return _guarded(training, report)


def _guarded(training: Training, report: Report) -> dict[str, Any]:
    """The training's result; an unexpected error becomes a result too, so that the other trainings go on."""
    try:
        return run_training(training, lambda step: report(training.name, step))
    except Exception as error:
        return {
            "task": training.task,
            "scheme": training.scheme,
            "options": training.options,
            "status": FAILED,
            "reason": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
