"""Setting attributes on single module instances, and taking every one of them back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn


@dataclass
class _Change:
    target: Any
    attribute: str
    had_value: bool
    value: Any
    kind: Literal["attribute", "buffer", "frozen"] = "attribute"


@dataclass
class InstancePatches:
    """A journal of instance attributes. Nothing here ever touches a class or a module file.

    Plain data, so that a deep copy or a pickle of the model carries a journal that refers to the copy.
    """

    changes: list[_Change] = field(default_factory=list)

    def set(self, target: Any, attribute: str, value: Any) -> None:
        """Sets `target.attribute` on the instance and remembers what the instance had there."""
        own = target.__dict__
        self.changes.append(_Change(target, attribute, attribute in own, own.get(attribute)))
        own[attribute] = value

    def set_buffer(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Exchanges a buffer. One that the module's forward assigns to cannot be hidden behind an attribute."""
        self.changes.append(_Change(module, name, True, module._buffers[name], "buffer"))
        module._buffers[name] = value

    def set_forward(self, module: nn.Module, value: Any) -> None:
        """Replaces the module's forward; where accelerate has hooked the module, the one inside its hook."""
        hooked = "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__
        self.set(module, "_old_forward" if hooked else "forward", value)

    def freeze(self, module: nn.Module, name: str) -> None:
        """Stops training a native weight that the new scheme leaves without effect.

        It is remembered by its place: loading a state dict may put another parameter there.
        """
        parameter = module._parameters[name]
        if parameter is not None:
            self.changes.append(_Change(module, name, True, parameter.requires_grad, "frozen"))
            parameter.requires_grad_(False)

    def undo(self) -> None:
        """Restores everything in reverse order."""
        for change in reversed(self.changes):
            if change.kind == "frozen":
                change.target._parameters[change.attribute].requires_grad_(change.value)
            elif change.kind == "buffer":
                change.target._buffers[change.attribute] = change.value
            elif change.had_value:
                change.target.__dict__[change.attribute] = change.value
            else:
                change.target.__dict__.pop(change.attribute, None)
        self.changes.clear()
