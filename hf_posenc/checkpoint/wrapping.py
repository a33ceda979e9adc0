"""Wraps methods of other packages, once per process. A copy of this package that is imported later takes over."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MARK = "_hf_posenc_wraps"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a method or function by `wrapper(original, self_or_class, *args, **kwargs)`.

    Args:
        owner: the class that has the method, itself or from a base, or the module that defines the function. A function
            is replaced in every module that has imported it by its name.
        name: name of the method; if it is already wrapped, nothing changes.
        wrapper: called with the stock method as first argument. A wrapper of a module's function or of a static method
            gets no `self_or_class`.
    """
    raw = inspect.getattr_static(owner, name)
    kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    original = replaced = raw if kind is None else raw.__func__
    if _is_of_another_copy(original):
        original = getattr(original, _MARK)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    setattr(owner, name, wrapped if kind is None else kind(wrapped))
    if isinstance(owner, ModuleType):
        for module in list(sys.modules.values()):
            # getattr is not used, because lazy packages import submodules on attribute access.
            if getattr(module, "__dict__", {}).get(name) is replaced:
                setattr(module, name, wrapped)


def _is_of_another_copy(function: Any) -> bool:
    """Whether a function is a wrapper created by an earlier import of this module."""
    module = getattr(function, "__globals__", {})
    return hasattr(function, _MARK) and module.get("__name__") == __name__ and module is not globals()
