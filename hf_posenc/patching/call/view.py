"""Views: another `self` for the own forward of a module, and other objects with some attributes changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


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


class Viewed:
    """Base class of what runs the forward of `module` as a view, which is made once and in no copy."""

    module: Any
    _view: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_view": None}

    @property
    def view(self) -> Any:
        """The module with the `replaced` properties and methods."""
        if self._view is None:
            self._view = view_of(self.module, self.replaced())
        return self._view

    def replaced(self) -> dict[str, Any]:
        """Properties and methods of the view's class."""
        raise NotImplementedError


class WithoutTable(Viewed):
    """A stack that adds the rows of a buffer, as a view that adds zeros at any position. The buffer stays as it is.

    Args:
        module: the stack.
        name: of the buffer.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name

    def replaced(self) -> dict[str, Any]:
        """The buffer."""
        return {self.name: property(lambda view: _ZeroRows(self.module._buffers[self.name]))}


class _ZeroRows:
    def __init__(self, table: Tensor | None) -> None:
        self.table = table

    def to(self, **kwargs: Any) -> Tensor | None:
        """What the stack assigns to its buffer, which it reads again afterwards."""
        return self.table

    def __getitem__(self, places: tuple[Tensor, slice]) -> Tensor:
        """A single column, which broadcasts in the addition to embeddings of any dtype."""
        return torch.zeros(*places[0].shape, 1, dtype=torch.bool, device=places[0].device)


class WithOverrides:
    """A proxy that overrides some attributes of an object. Assignments go to the object."""

    def __init__(self, target: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)
