"""Executors of training runs: processes on this machine, a dask cluster, or jobs of submitit."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hf_posenc.errors import UnknownNameError
from hf_posenc.installation import require
from training.errors import SettingsError, settings_errors
from training.machine import usable_cores
from training.study.settings import StudySettings

#: The options that submitit's `LocalExecutor` reads. It ignores all others.
_SUBMITIT_LOCAL = {"timeout_min", "gpus_per_node", "stderr_to_stdout", "local_setup"}
#: Defaults under the user's own settings. A daemonic worker could not start processes to read data. Restarting a killed
#: worker takes longer than 15 seconds, after which dask gives up on it. Memory that is freed at once doubles a step.
_DISTRIBUTED = {
    "worker": {"daemon": False}, "deploy": {"lost-worker-timeout": "1 hour"},
    "nanny": {"pre-spawn-environ": {"MALLOC_TRIM_THRESHOLD_": 2**33, "MALLOC_MMAP_THRESHOLD_": 2**25}},
}  # fmt: skip

#: A `concurrent.futures.Future`, or a job of submitit, which has `done`, `result` and `cancel` as well.
Job = Any


@dataclass
class Executor:
    """An open executor.

    Args:
        slots: maximum number of jobs at the same time.
        submit: starts a job. Called with the number of its slot, a function and the arguments of the function.
        threads: number of torch threads in each job; `None` does not change it.
    """

    slots: int
    submit: Callable[..., Job]
    threads: int | None = None


def open_executor(study: StudySettings, jobs: int) -> AbstractContextManager[Executor]:
    """Starts the executor of a study, and stops it at the end."""
    return {"local": _local, "dask": _dask, "submitit": _submitit}[study.executor](study, jobs)


@contextmanager
def in_this_process() -> Iterator[Executor]:
    """Runs each job immediately in this process."""

    def submit(slot: int, function: Callable[..., Any], *arguments: Any) -> Job:
        job: Future[Any] = Future()
        job.set_result(function(*arguments))
        return job

    yield Executor(1, submit)


@contextmanager
def _local(study: StudySettings, jobs: int) -> Iterator[Executor]:
    """Starts a process for each slot, each on its own GPU if there are any. A killed process is replaced."""
    if study.executor_options:
        raise SettingsError("--executor_options are for dask and submitit. The local executor only has --workers.")
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    devices = devices if all(devices) else [str(number) for number in range(torch.cuda.device_count())]
    slots = study.worker_count(jobs, torch.cuda.device_count())
    if slots == 1:
        with in_this_process() as executor:
            yield executor
        return
    context = multiprocessing.get_context("spawn")
    pools: dict[int, ProcessPoolExecutor] = {}

    def submit(slot: int, function: Callable[..., Any], *arguments: Any) -> Job:
        try:
            return pools[slot].submit(function, *arguments)
        except (KeyError, BrokenProcessPool):
            device = devices[slot % len(devices)] if devices else None
            pools[slot] = ProcessPoolExecutor(1, context, _start_worker, (device,))
            return pools[slot].submit(function, *arguments)

    try:
        yield Executor(slots, submit, max(1, usable_cores() // slots))
        for pool in pools.values():
            pool.shutdown()
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise


def _start_worker(device: str | None) -> None:
    if device is not None:
        # CUDA reads this when it starts. A process that sees several GPUs would train on all of them.
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    # Ctrl-C reaches the whole process group. The main process terminates the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _dask(study: StudySettings, jobs: int) -> Iterator[Executor]:
    """Connects to the cluster at `address` (or of `scheduler_file`), or starts one here with all other options."""
    require("--executor dask", "dask", "distributed")
    import dask
    import distributed

    options, threads, slots = study.executor_options, None, study.workers or jobs
    with ExitStack() as stack:
        with _refused(study):
            if {"address", "scheduler_file"} & options.keys():
                client = stack.enter_context(distributed.Client(**options))
            else:
                if "n_workers" in options:
                    raise ValueError("n_workers is --workers")
                # LocalCluster passes unknown options to its workers, whose error is 68 lines long.
                takers = distributed.LocalCluster, distributed.Nanny, distributed.Worker
                known = {name for taker in takers for name in inspect.signature(taker).parameters}
                if unknown := [name for name in options if name not in known]:
                    listing = "help(distributed.LocalCluster) and help(distributed.Worker)"
                    raise UnknownNameError("option", unknown[0], known, owner="dask's LocalCluster", listing=listing)
                slots = study.worker_count(jobs, torch.cuda.device_count())
                threads = max(1, usable_cores() // slots)
                dask.config.update_defaults({"distributed": _DISTRIBUTED})
                defaults = {"threads_per_worker": 1, "dashboard_address": None, "memory_limit": None}
                cluster = distributed.LocalCluster(n_workers=slots, **(defaults | options))
                client = stack.enter_context(distributed.Client(stack.enter_context(cluster)))
        pool = client.get_executor(pure=False)
        yield Executor(slots, lambda slot, *call: pool.submit(*call), threads)


@contextmanager
def _submitit(study: StudySettings, jobs: int) -> Iterator[Executor]:
    """Starts a job for each training: on SLURM if available, otherwise on this machine. Logs: `trainings/jobs`."""
    require("--executor submitit", "submitit")
    import submitit

    options = {"timeout_min": 24 * 60, **study.executor_options}
    with _refused(study):
        pool = submitit.AutoExecutor(f"{study.output_dir}/trainings/jobs/%j", cluster=options.pop("cluster", None))
        pool.update_parameters(**options)
        local = pool.cluster == "local"
        others = [name for name in options if "_" in name and name.split("_")[0] in {"slurm", "local", "debug"}]
        ignored = [name for name in others if not name.startswith(f"{pool.cluster}_")]
        ignored += [name for name in options if local and name not in _SUBMITIT_LOCAL]
        if ignored:
            raise ValueError(f"the cluster is {pool.cluster!r}, which ignores {', '.join(dict.fromkeys(ignored))}")
        if {"nodes", "tasks_per_node"} & options.keys():
            raise ValueError("a training run is one task on one node, so nodes and tasks_per_node cannot be set")
    slots = study.worker_count(jobs, torch.cuda.device_count()) if local else study.workers or jobs
    # As multiprocessing does for child processes.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        threads = max(1, usable_cores() // slots) if local else None
        yield Executor(slots, lambda slot, *call: pool.submit(*call), threads)
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if path is None else {"PYTHONPATH": path})


def _refused(study: StudySettings) -> AbstractContextManager[None]:
    """Reports the error of an executor about its options."""
    what = f"--executor {study.executor} with --executor_options {study.executor_options} cannot be started"
    kinds = (TypeError, ValueError, NameError, AssertionError, RuntimeError, OSError)
    return settings_errors(what, *kinds, with_kind=True)
