"""Runs a function for every architecture in a process of its own, with a timeout: one that dies costs one row."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from .population import Pair

#: A server that has imported everything forks for each architecture.
_CONTEXT = multiprocessing.get_context("forkserver")

Answer = Any


def each(
    function: Callable[[Pair], Answer], pairs: list[Pair], *, processes: int, timeout: float, preload: str
) -> Iterator[tuple[Pair, Answer, str]]:
    """Pairs with what the function returned, or with why it did not.

    Args:
        function: importable by name; its answers can be pickled.
        pairs: the architectures.
        processes: how many run at a time.
        timeout: seconds for each.
        preload: the module that the server imports.
    """
    _CONTEXT.set_forkserver_preload([preload])
    with ThreadPoolExecutor(processes) as pool:
        for pair, (answer, died) in zip(
            pairs, pool.map(lambda pair: _one(function, pair, timeout), pairs), strict=True
        ):
            yield pair, answer, died


def _one(function: Callable[[Pair], Answer], pair: Pair, timeout: float) -> tuple[Answer, str]:
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(function, pair, sender), daemon=True)
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(timeout) else (None, f"no answer after {timeout:.0f} s")
    except EOFError:
        found = None, "the process died"
    process.kill()
    process.join()
    answer, died = found
    return answer, died


def _run(function: Callable[[Pair], Answer], pair: Pair, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        sender.send((function(pair), ""))
    except Exception:
        # Building and calling somebody else's model may raise anything: the sweep goes on, the answer holds the
        # traceback, and the exit status of the caller says that a process died.
        sender.send((None, traceback.format_exc(limit=-4)))
