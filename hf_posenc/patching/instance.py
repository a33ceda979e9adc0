"""Setting attributes on single module instances, and taking every one of them back."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError

#: Types whose values are compared, not their identity.
_PLAIN = (int, float, str)


@dataclass
class _Change:
    target: Any
    attribute: str
    had_value: bool
    value: Any
    kind: Literal["attribute", "forward", "buffer", "frozen"] = "attribute"
    ours: Any = None

    def put(self, value: Any) -> None:
        """Exchanges the value that stands in the attribute while the patch is in place."""
        self.target.__dict__[self.attribute] = self.ours = value

    @property
    def is_in_place(self) -> bool:
        """Whether the attribute still has the patch's value; numbers and strings are compared by value, for pickles."""
        found = self.target.__dict__.get(self.attribute)
        return found is self.ours or (
            type(found) is type(self.ours) and isinstance(found, _PLAIN) and found == self.ours
        )


@dataclass
class InstancePatches:
    """A journal of instance attributes. Nothing here ever touches a class or a module file.

    Plain data, so that a deep copy or a pickle of the model carries a journal that refers to the copy.
    """

    changes: list[_Change] = field(default_factory=list)

    def set(self, target: Any, attribute: str, value: Any) -> None:
        """Sets `target.attribute` on the instance and remembers what the instance had there."""
        own = target.__dict__
        self.changes.append(_Change(target, attribute, attribute in own, own.get(attribute), ours=value))
        own[attribute] = value

    def set_buffer(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Exchanges a buffer. One that the module's forward assigns to cannot be hidden behind an attribute."""
        self.changes.append(_Change(module, name, True, module._buffers[name], "buffer"))
        module._buffers[name] = value

    def set_forward(self, module: nn.Module, value: Any) -> None:
        """Replaces the module's forward; where accelerate has hooked the module, the one inside its hook.

        Raises:
            UnsupportedError: if the instance has another forward than its class already, which would be passed over.
        """
        if _place_of_forward(module) == "forward" and "forward" in module.__dict__:
            raise UnsupportedError(
                f"This {type(module).__name__} has a forward of its own, set on the instance by another library or by "
                "hand; a patch would pass it over. Take it off first, and put it on again afterwards if it has to be."
            )
        self.wrap_forward(module, lambda inner: value)

    def wrap_forward(self, module: nn.Module, wrapper: Callable[[Any], Any]) -> None:
        """Replaces the module's forward by one that calls it.

        Args:
            module: the module.
            wrapper: makes the new forward from what the instance had there, `None` for the forward of its class.
        """
        own, place = module.__dict__, _place_of_forward(module)
        before = own.get(place)
        # accelerate keeps a bound method where there was nothing.
        stock = before is None or getattr(before, "__func__", None) is type(module).forward
        value = wrapper(None if stock else before)
        self.changes.append(_Change(module, place, place in own, (value, before), "forward"))
        own[place] = value

    def freeze(self, module: nn.Module, name: str) -> None:
        """Stops training a native weight that the new scheme leaves without effect.

        It is remembered by its place: loading a state dict may put another parameter there.
        """
        parameter = module._parameters[name]
        if parameter is not None:
            self.changes.append(_Change(module, name, True, parameter.requires_grad, "frozen"))
            parameter.requires_grad_(False)

    def undo(self) -> None:
        """Restores everything in reverse order, except an attribute that somebody has set again since."""
        for change in reversed(self.changes):
            if change.kind == "forward":
                _restore_forward(change)
            elif change.kind == "frozen":
                change.target._parameters[change.attribute].requires_grad_(change.value)
            elif change.kind == "buffer":
                change.target._buffers[change.attribute] = change.value
            elif not change.is_in_place:
                continue
            elif change.had_value:
                change.target.__dict__[change.attribute] = change.value
            else:
                change.target.__dict__.pop(change.attribute, None)
        self.changes.clear()


def _place_of_forward(module: nn.Module) -> str:
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def _restore_forward(change: _Change) -> None:
    """Takes a forward out from where it is now: hooks come and go around it while a model is patched."""
    own, (ours, before) = change.target.__dict__, change.value
    stock = types.MethodType(type(change.target).forward, change.target)
    if own.get("_old_forward") is ours:
        own["_old_forward"] = before if change.attribute == "_old_forward" else stock
    elif own.get("forward") is ours:
        if change.had_value and change.attribute == "forward":
            own["forward"] = before
        else:
            del own["forward"]
