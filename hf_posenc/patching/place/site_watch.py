"""Checking that every self-attention module and every position table of a patched stack is still patched.

Tools that remove, copy or stack layers keep patched modules. A module that was created after the patch is not patched:
it would use its native positions, or rotate with phases that are no longer computed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.table_site import TableSite
from hf_posenc.patching.find.architectures import architecture_of
from hf_posenc.patching.find.discovery import grid_table_owners, self_attentions, tables


class SiteWatch:
    """Finds the modules of one stack that should be patched but are not.

    Each call compares the children of every module above a patched module with those at the last check, which takes one
    comparison of two short lists per module. Only if they differ is the whole stack searched again.

    Args:
        stack: the stack.
    """

    def __init__(self, stack: nn.Module) -> None:
        self.stack = stack
        self._reset()

    def _reset(self) -> None:
        self._children: list[tuple[dict[str, Any], list[Any]]] = []
        self._attributes: list[dict[str, Any]] = []
        #: Key in `_watches`. A compiler reads only this number.
        self.number = next(_numbers)
        _watches[self.number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {"stack": self.stack}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.stack = state["stack"]
        self._reset()

    def check(self) -> None:
        """Refuses a call if a module is not patched.

        Raises:
            UnsupportedError: naming the first such module.
        """
        if torch.compiler.is_compiling():
            problem = _problem_of(self.number)
        elif self._is_unchanged():
            return
        else:
            problem = self.problem()
        if problem:
            raise UnsupportedError(problem)

    def problem(self) -> str:
        """A message that describes the problem; empty if all modules of the stack are patched."""
        architecture = architecture_of(self.stack.config)
        attentions = list(self_attentions(self.stack, architecture))
        found_tables = list(tables(self.stack, architecture))
        owners = list(grid_table_owners(self.stack))
        bare = [(path, module) for path, module in (*attentions, *owners) if not _has_forward(module)]
        bare += [(path, module) for path, module in found_tables if not _has_table_site(module)]
        if bare:
            path, module = bare[0]
            more = f", and {len(bare) - 1} more" if len(bare) > 1 else ""
            return (
                f"{path} ({type(module).__name__}) of this {type(self.stack).__name__}{more} has no position encoding: "
                "it was added to the model, or lost its forward, after patch_model, and would use its native "
                "positions. Call patch_model again. This initialises the parameters of the scheme: if they were "
                "trained, save model.position_encoding.state_dict() before, and load it afterwards."
            )
        self._remember([module for _, module in attentions], [module for _, module in (*found_tables, *owners)])
        return ""

    def _is_unchanged(self) -> bool:
        for attributes in self._attributes:
            if "forward" not in attributes:
                return False
        # A loop, because `all` with a generator takes twice as long.
        for children, before in self._children:
            if [*children.values()] != before:
                return False
        return bool(self._children)

    def _remember(self, attentions: list[nn.Module], found_tables: list[nn.Module]) -> None:
        sited = {id(module) for module in (*attentions, *found_tables)}
        self._attributes = [module.__dict__ for module in attentions]
        above = {id(module): module for module in _above(self.stack, sited)}
        self._children = [(module._modules, [*module._modules.values()]) for module in above.values()]


_numbers = itertools.count()
_watches: weakref.WeakValueDictionary[int, SiteWatch] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result
def _problem_of(number: int) -> str:
    """Runs while a graph is traced, without becoming part of it. The graph is retraced if the modules change."""
    return _watches[number].problem()


def _above(module: nn.Module, sited: set[int]) -> Iterator[nn.Module]:
    """The modules that contain one of `sited`, `module` included."""
    contains = False
    for child in module.children():
        if id(child) in sited:
            contains = True
            continue
        for found in _above(child, sited):
            contains = True
            yield found
    if contains:
        yield module


def _has_forward(module: nn.Module) -> bool:
    """Whether an instance has another forward than its class, possibly inside accelerate's hook.

    The type of the forward is not checked, because another library may have wrapped it.
    """
    own = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _has_table_site(table: nn.Module) -> bool:
    """Whether a table, or the one inside a PEFT wrapper, is patched."""
    places = ("forward", "_old_forward")
    return any(isinstance(module.__dict__.get(place), TableSite) for module in table.modules() for place in places)
