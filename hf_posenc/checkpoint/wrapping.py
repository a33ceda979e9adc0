"""Wrapping methods of other packages, once per process; a copy of this package that is imported later takes over."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MARK = "_hf_posenc_wraps"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Puts `wrapper(original, self_or_class, *args, **kwargs)` in the place of a method or function.

    Args:
        owner: the class that has the method, itself or from a base, or the module that defines the function. A function
            is replaced in every module that has imported it by its name.
        name: of the method; where it is wrapped already, nothing changes.
        wrapper: called with the stock method first. A wrapper of a module's function gets no `self_or_class`.
    """
    raw = inspect.getattr_static(owner, name)
    is_classmethod = isinstance(raw, classmethod)
    original = replaced = raw.__func__ if is_classmethod else raw
    if _is_of_another_copy(original):
        original = getattr(original, _MARK)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)
    if isinstance(owner, ModuleType):
        for module in list(sys.modules.values()):
            # Not getattr: packages import their parts when an attribute is looked up.
            if getattr(module, "__dict__", {}).get(name) is replaced:
                setattr(module, name, wrapped)


def _is_of_another_copy(function: Any) -> bool:
    """Whether a function is a wrapper that this module made before it was imported again."""
    module = getattr(function, "__globals__", {})
    return hasattr(function, _MARK) and module.get("__name__") == __name__ and module is not globals()
