"""Calls in separate processes, which time them.

torch stores the compiled graphs of a function with its code, which all models of a class share, and checks the
conditions of one graph after the other. In a process with several compiled models, the second of two equal models takes
twice as long. So a process for each model is forked before anything is compiled.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from benchmarks.errors import BenchmarkError


class Apart:
    """A call that is made and timed in a separate process. `prepare` returns it and one that restores the state."""

    def __init__(self, prepare: Callable[[], tuple[Callable[[], object], Callable[[], object]]]) -> None:
        if torch.cuda.is_initialized():
            raise BenchmarkError("compiled models are timed in forked processes, which cannot use this process's GPU")
        self._ours, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=_serve, args=(theirs, prepare), daemon=True)
        self._process.start()

    def seconds(self) -> float:
        """Makes the call once."""
        self._ours.send(None)
        answer: float | str = self._ours.recv()
        if isinstance(answer, str):
            raise BenchmarkError(answer)
        return answer

    def close(self) -> None:
        """Ends the process. It does not end itself, because other processes also have the pipe open."""
        self._process.terminate()
        self._process.join()


def _serve(pipe: Connection, prepare: Callable[[], tuple[Callable[[], object], Callable[[], object]]]) -> None:
    # The compiler would start more processes.
    torch._inductor.config.compile_threads = 1
    calls: tuple[Callable[[], object], Callable[[], object]] | None = None
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        try:
            run, after = calls = calls or prepare()
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            after()
            pipe.send(seconds)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {str(error).strip()[:300]}")
