"""Views of a module: another `self` for its own forward, in which some attributes have other values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def view_of(module: nn.Module, replaced: Mapping[str, Any]) -> Any:
    """A view that shares the attributes of a module, later changes included.

    Its class has the name of the module's class, because transformers finds the outputs that a model can record by that
    name.

    Args:
        module: the module.
        replaced: properties and methods of the view's class.
    """
    kind: Any = type(module)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    view_kind: Any = type(kind.__name__, (kind,), {**replaced, **named})
    view = view_kind.__new__(view_kind)
    object.__setattr__(view, "__dict__", module.__dict__)
    return view
