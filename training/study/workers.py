"""Trainings on an executor. Each has one worker at a time, even if workers or the processes that sent them die."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import SoftFileLease
from transformers.utils import logging as transformers_logging

from hf_posenc.extensions import name_modules
from training.checkpoints import differences
from training.files import read_json
from training.machine import launched_on_cpu
from training.study.cells import FAILED, Cell
from training.study.executors import Executor, Job
from training.study.folder import is_free, lease_of
from training.study.run import run_cell

#: A training that loses this many workers has failed. Each worker starts from the last checkpoint.
LOSSES = 3
_POLL_SECONDS = 0.2
_NOTE_SECONDS = 1.0
#: Trainings use the random generators of their process, and a dask worker may have several threads.
_one_at_a_time = threading.Lock()


class SupersededError(RuntimeError):
    """Another process took over the training, because this one did not renew its lease for too long."""


def run_cells(
    cells: list[Cell], identities: dict[str, dict[str, Any]], executor: Executor
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Runs the training runs, and yields each with its result as soon as it has ended.

    Several processes with the same folder share the training runs. If the worker of a training is lost, the training is
    sent again.
    """
    waiting, running = list(cells), dict[Job, tuple[Cell, int]]()
    leases = {cell.name: lease_of(cell) for cell in cells}
    slots, lost, told = list(range(executor.slots)), Counter[str](), False
    try:
        while waiting or running:
            for cell in _ready(waiting, [cell for cell, _ in running.values()]):
                lease = leases[cell.name] if slots else None
                result, free = _agreed(partial(_look, cell, lease))
                if result is not None:
                    waiting.remove(cell)
                    yield cell, result
                elif free:
                    waiting.remove(cell)
                    slot = slots.pop(0)
                    job = executor.submit(slot, train, cell, identities.get(cell.name), executor.threads)
                    running[job] = cell, slot
            ended = [job for job in running if job.done()]
            for job in ended:
                cell, slot = running.pop(job)
                slots.append(slot)
                try:
                    result = job.result()
                except Exception as error:  # `train` returns its own errors, so the worker is lost
                    lost[cell.name] += 1
                    reason = (
                        f"It lost its worker {LOSSES} times ({type(error).__name__}: {error}). On a small machine the "
                        "usual cause is memory. Its checkpoints are kept: run the same command again to resume, "
                        "perhaps with fewer --workers."
                    )
                    result = _failed(cell, reason) if lost[cell.name] == LOSSES else None
                if result is None:
                    waiting.insert(0, cell)
                else:
                    yield cell, result
            if not ended and not running and not told:
                told = True
                names = ", ".join(cell.name for cell in _ready(waiting, []))
                print(f"Another process trains {names}; this one waits for the results.", file=sys.stderr)
            if not ended:
                time.sleep(_POLL_SECONDS)
    except BaseException:
        for job in running:
            job.cancel()
        raise


def _ready(waiting: list[Cell], running: Iterable[Cell]) -> list[Cell]:
    """Returns the waiting training runs whose starting model is ready."""
    open_cells = {cell.name for cell in (*waiting, *running)}
    return [cell for cell in waiting if cell.start is None or cell.start.name not in open_cells]


def _look(cell: Cell, lease: SoftFileLease | None) -> tuple[dict[str, Any] | None, bool]:
    """Returns the result of a training that ended elsewhere, and whether an unfinished one can be sent to a worker."""
    return cell.result(), lease is not None and is_free(lease)


def _agreed(ask: Callable[[], Any]) -> Any:
    """Returns the answer of the first of the processes that train together."""
    state = PartialState(cpu=launched_on_cpu())
    answer = [ask() if state.is_main_process else None]
    return broadcast_object_list(answer)[0] if state.num_processes > 1 else answer[0]


def quiet() -> None:
    """Silences other output, so that only the study's own progress bar is shown."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def train(cell: Cell, identity: dict[str, Any] | None, threads: int | None) -> dict[str, Any] | None:
    """The job of a worker: runs a training, unless another process does. It records its steps in the folder.

    Returns:
        The result; `None` if another process runs it. An unexpected error is also a result, so the others continue.
    """
    with _one_at_a_time:
        if threads is not None:
            torch.set_num_threads(threads)
        quiet()
        name_modules(cell.study.imports)
        superseded = threading.Event()
        lease = lease_of(cell, superseded.set)
        if not _agreed(lambda: is_free(lease, keep=True)):
            return None

        noted = 0.0

        def step(number: int) -> None:
            nonlocal noted
            if superseded.is_set():
                raise SupersededError
            if time.monotonic() - noted > _NOTE_SECONDS:
                noted = time.monotonic()
                cell.step_file.write_text(str(number), encoding="utf-8")

        try:
            return _train(cell, identity, step)
        except SupersededError:
            return None
        except Exception as error:
            return _failed(cell, f"{type(error).__name__}: {error}") | {"traceback": traceback.format_exc()}
        finally:
            lease.release()


def _train(cell: Cell, identity: dict[str, Any] | None, on_step: Callable[[int], None]) -> dict[str, Any]:
    result, begun = _agreed(lambda: (cell.result(), read_json(cell.folder / "settings.json") or {}))
    if result is not None:
        ended: dict[str, Any] = result
        return ended
    if identity is not None and (changed := differences(begun, identity)):
        return _failed(cell, f"Another study has started it with other settings: {'; '.join(changed)}.")
    return run_cell(cell, on_step)


def _failed(cell: Cell, reason: str) -> dict[str, Any]:
    return {**cell.head(), "status": FAILED, "reason": reason}
