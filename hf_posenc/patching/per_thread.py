"""A stack of values for each thread, so that two threads can run one model at the same time."""

from __future__ import annotations

import threading
from threading import get_ident
from typing import Any, Generic, TypeVar

from torch.compiler import is_compiling

Value = TypeVar("Value")

_MAIN_THREAD = threading.main_thread().ident


class PerThread(Generic[Value]):
    """`push`, `pop` and `top` act on the calling thread's own stack."""

    def __init__(self) -> None:
        self._main: list[Value] = []
        self._others: dict[int, list[Value]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_main": [], "_others": {}}

    def _own(self) -> list[Value]:
        # A thread's number cannot be traced, so compiled code stands for the main thread.
        if is_compiling() or get_ident() == _MAIN_THREAD:
            return self._main
        return self._others.setdefault(get_ident(), [])

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
        # Asked for in every layer.
        own = self._main if is_compiling() or get_ident() == _MAIN_THREAD else self._others.get(get_ident())
        return own[-1] if own else None
