"""A stack of values for each thread, so that two threads can run one model at the same time."""

from __future__ import annotations

import threading
from threading import get_ident
from typing import Any, Generic, TypeVar

from torch.compiler import is_compiling

Value = TypeVar("Value")

_MAIN_THREAD = threading.main_thread().ident


class PerThread(Generic[Value]):
    """Values of the calls in progress on each thread, the innermost on top.

    A call pushes its value and removes it even if an error or an interrupt occurs::

        own = values.own()
        depth = len(own)
        try:
            own.append(value)
            ...
        finally:
            del own[depth:]

    The last line calls no function, so Python cannot deliver a signal before it completes. It also removes values that
    inner calls have left behind.
    """

    def __init__(self) -> None:
        self._main: list[Value] = []
        self._others: dict[int, list[Value]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_main": [], "_others": {}}

    def own(self) -> list[Value]:
        """The calling thread's own stack."""
        # The id of a thread cannot be traced, so compiled code always uses the stack of the main thread.
        if is_compiling() or get_ident() == _MAIN_THREAD:
            return self._main
        return self._others.setdefault(get_ident(), [])

    @property
    def in_progress(self) -> bool:
        """Whether a call is in progress on any thread."""
        return bool(self._main) or any(self._others.values())

    @property
    def top(self) -> Value | None:
        """The value on top, or `None`."""
        # Inlined for speed, because every layer reads it.
        own = self._main if is_compiling() or get_ident() == _MAIN_THREAD else self._others.get(get_ident())
        return own[-1] if own else None
