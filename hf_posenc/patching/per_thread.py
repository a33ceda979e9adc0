"""A stack of values for each thread, so that two threads can run one model at the same time."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import torch

Value = TypeVar("Value")

_MAIN_THREAD = threading.main_thread().ident


class PerThread(Generic[Value]):
    """`push`, `pop` and `top` act on the calling thread's own stack."""

    def __init__(self) -> None:
        self._values: dict[int, list[Value]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_values": {}}

    def _own(self) -> list[Value]:
        # A thread's number cannot be traced, so compiled code stands for the main thread.
        main = torch.compiler.is_compiling() or threading.get_ident() == _MAIN_THREAD
        key = 0 if main else threading.get_ident()
        if key not in self._values:
            self._values[key] = []
        return self._values[key]

    def push(self, value: Value) -> None:
        """Puts a value on top."""
        self._own().append(value)

    def pop(self) -> None:
        """Drops the value on top, if there is one."""
        own = self._own()
        if own:
            own.pop()

    @property
    def top(self) -> Value | None:
        """The value on top, or `None`."""
        own = self._own()
        return own[-1] if own else None
