"""Runs a function for every item in a separate process, with a timeout: a process that dies costs one item."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import transformers

Item = TypeVar("Item")
Answer = Any

#: A server that has imported everything forks for each item.
_CONTEXT = multiprocessing.get_context("forkserver")


def each(
    function: Callable[[Item], Answer], items: Sequence[Item], *, processes: int, timeout: float, preload: str
) -> Iterator[tuple[Item, Answer, str]]:
    """Items with what the function returned, or with why it did not.

    Args:
        preload: the module that the server imports.
    """
    _CONTEXT.set_forkserver_preload([preload])
    pool = ThreadPoolExecutor(processes)
    try:
        answers = pool.map(lambda item: _one(function, item, timeout), items)
        for item, (answer, died) in zip(items, answers, strict=True):
            yield item, answer, died
    finally:
        # After Ctrl-C, nothing more is started.
        pool.shutdown(cancel_futures=True)


def _one(function: Callable[[Item], Answer], item: Item, timeout: float) -> tuple[Answer, str]:
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(function, item, sender), daemon=True)
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(timeout) else (None, f"no answer after {timeout:g} s")
    except EOFError:
        found = None, "the process died"
    process.kill()
    process.join()
    answer, died = found
    return answer, died


def _run(function: Callable[[Item], Answer], item: Item, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        sender.send((function(item), ""))
    except Exception:
        # Other code may raise anything: the other items continue, and the answer has the traceback.
        sender.send((None, traceback.format_exc(limit=-4)))


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
