"""The journal of a patch: every attribute it sets on an instance, and how to restore it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import transformers
from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.tables import OwnedTable
from hf_posenc.patching.call.placed_forward import (
    PlacedForward,
    forward_on_instance,
    place_of_forward,
    refuse_foreign_forward,
)

#: Types whose values are compared, not their identity.
_PLAIN = (int, float, str)


@dataclass
class _Change:
    target: Any
    attribute: str
    had_value: bool
    value: Any
    kind: Literal["attribute", "aside", "forward", "frozen", "hook"] = "attribute"
    ours: Any = None

    def put(self, value: Any) -> None:
        """Changes the value that the attribute has while the patch is in place."""
        self.target.__dict__[self.attribute] = self.ours = value

    @property
    def is_in_place(self) -> bool:
        """Whether the attribute still has the patch's value. Numbers and strings are compared by value, for pickles."""
        found = self.target.__dict__.get(self.attribute)
        return found is self.ours or (
            type(found) is type(self.ours) and isinstance(found, _PLAIN) and found == self.ours
        )


@dataclass
class Journal:
    """A journal of instance attributes. No class and no module file is ever changed.

    It is plain data, so a deep copy or a pickle of the model has a journal that refers to the copy.
    """

    changes: list[_Change] = field(default_factory=list)

    def set(self, target: Any, attribute: str, value: Any) -> None:
        """Sets `target.attribute` on the instance and records the previous value."""
        own = target.__dict__
        self.changes.append(_Change(target, attribute, attribute in own, own.get(attribute), ours=value))
        own[attribute] = value

    def put_aside(self, target: Any, attribute: str) -> None:
        """Removes an attribute from the instance until the patch is undone. Undoing overwrites a later value."""
        own = target.__dict__
        self.changes.append(_Change(target, attribute, attribute in own, own.get(attribute), "aside"))
        own.pop(attribute, None)

    def replace(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Sets an attribute that the module, or its class, has.

        Raises:
            UnsupportedError: if there is none, because the new attribute would never be used.
        """
        if not hasattr(module, attribute):
            raise UnsupportedError(
                f"{type(module).__name__} has no {attribute!r} to replace. transformers {transformers.__version__} "
                "computes its position mechanism in a place unknown to hf_posenc, and it would remain active next to "
                "any scheme. Use a version of transformers that hf_posenc was tested with."
            )
        self.set(module, attribute, value)

    def set_forward(self, module: nn.Module, value: Any) -> None:
        """Replaces the module's forward, or the forward inside accelerate's hook where the module has one.

        Raises:
            UnsupportedError: if another library has set a forward on the instance, which would no longer be called.
        """
        if any(change.kind == "forward" and change.target is module for change in self.changes):
            raise UnsupportedError(
                f"This {type(module).__name__} is used in several layers of the model, and a scheme has separate state "
                "for each layer. Give each layer its own module (copy.deepcopy)."
            )
        refuse_foreign_forward(module)
        if forward_on_instance(module) is not None:
            raise UnsupportedError(
                f"This {type(module).__name__} is shared with another model that is patched, so it would run two "
                "position encodings. Unpatch that model, or give each model its own modules (copy.deepcopy)."
            )
        self.wrap_forward(module, lambda inner: value)

    def wrap_forward(self, module: nn.Module, wrapper: Callable[[Any], Any]) -> None:
        """Replaces the module's forward by one that calls it.

        Args:
            module: the module.
            wrapper: makes the new forward from the previous one; `None` stands for the forward of the class.
        """
        place, before = place_of_forward(module), forward_on_instance(module)
        value = wrapper(before)
        self.changes.append(_Change(module, place, before is not None, (value, before), "forward"))
        module.__dict__[place] = value

    def adopt_forward(self, module: nn.Module, forward: PlacedForward) -> None:
        """Records a forward that came to a module as a copy of one that this journal has placed."""
        place, inner = place_of_forward(module), forward.inner
        self.changes.append(_Change(module, place, inner is not None, (forward, inner), "forward"))

    def forwards(self) -> Iterator[Any]:
        """The forwards that are in effect, directly or inside a wrapper from another library."""
        for change in self.changes:
            if change.kind == "forward" and forward_on_instance(change.target) is not None:
                yield change.value[0]

    def add_forward_pre_hook(self, module: nn.Module, hook: Any) -> None:
        """Registers a hook that also takes keyword arguments."""
        self.changes.append(_Change(module, "_forward_pre_hooks", False, None, "hook", ours=hook))
        module.register_forward_pre_hook(hook, with_kwargs=True)

    def freeze(self, module: nn.Module, name: str) -> None:
        """Freezes a native weight that has no effect under the new scheme.

        It is recorded by module and name, because loading a state dict may replace the parameter.
        """
        parameter = module._parameters[name]
        if parameter is not None:
            self.changes.append(_Change(module, name, True, parameter.requires_grad, "frozen"))
            parameter.requires_grad_(False)

    def freeze_all(self, module: nn.Module) -> None:
        """Freezes all native weights in a module that has no effect under the new scheme.

        Raises:
            UnsupportedError: if an adapter changes them.
        """
        for one in module.modules():
            if type(one).__module__.startswith("peft."):
                raise UnsupportedError(
                    f"A scheme would replace the {type(module).__name__} of PEFT, which holds a part of an adapter. "
                    "That part would be lost, and training it would change nothing. Remove the adapter first "
                    "(model.unload()), and leave positions out of its config."
                )
            for name in one._parameters:
                self.freeze(one, name)

    def freeze_table(self, table: OwnedTable) -> None:
        """Freezes a table that a module owns, unless it is no parameter."""
        if isinstance(table.value, nn.Module):
            self.freeze_all(table.value)
        elif table.name in table.module._parameters:
            self.freeze(table.module, table.name)

    def undo(self) -> None:
        """Restores everything in reverse order, except attributes that were set again since.

        After an interrupt, a second call finishes the work.
        """
        while self.changes:
            _restore(self.changes[-1])
            self.changes.pop()


def is_set(journal: Journal, target: Any, attribute: str) -> bool:
    """Whether an attribute has a value that the journal recorded."""
    return any(change.target is target and change.attribute == attribute for change in journal.changes)


def _restore(change: _Change) -> None:
    if change.kind == "forward":
        _restore_forward(change)
    elif change.kind == "hook":
        remove_hook(change.target, change.ours)
    elif change.kind == "frozen":
        # A weight that was made trainable while the patch was in place stays trainable.
        parameter = change.target._parameters[change.attribute]
        parameter.requires_grad_(change.value or parameter.requires_grad)
    elif change.kind != "aside" and not change.is_in_place:
        return
    elif change.had_value:
        change.target.__dict__[change.attribute] = change.value
    else:
        change.target.__dict__.pop(change.attribute, None)


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Removes a hook, registered or not. It is found by identity, because an interrupt could lose a handle."""
    for number in [number for number, found in module._forward_pre_hooks.items() if found is hook]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def _restore_forward(change: _Change) -> None:
    """Removes a forward from its current place: other libraries may have added or removed wrappers since."""
    own, (ours, before) = change.target.__dict__, change.value
    if isinstance(ours, PlacedForward):
        ours.retired = True
    stock = types.MethodType(type(change.target).forward, change.target)
    if own.get("_old_forward") is ours:
        own["_old_forward"] = stock if before is None else before
    elif own.get("forward") is ours:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
