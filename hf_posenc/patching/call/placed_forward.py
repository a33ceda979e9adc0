"""Forwards that are set on single module instances, by this package or by other libraries."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_posenc.patching.call.runtime import StackRuntime


class OfStack:
    """What a scheme places in one module of a stack."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OfStack:
        """Copies it with its module. In the copy of a single layer, it shares the scheme of its stack."""
        watch = getattr(getattr(self, "runtime", None), "watch", None)
        if watch is not None and id(watch.stack) not in memo:
            shared = (getattr(self, name, None) for name in ("runtime", "encoding", "additive"))
            memo.update({id(value): value for value in shared if value is not None})
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state: Any = copy.deepcopy(self.__getstate__(), memo)
        getattr(clone, "__setstate__", clone.__dict__.update)(state)
        return clone


class PlacedForward(OfStack):
    """Stands in for the `forward` of one module instance while a scheme is in place.

    A tool that wraps the forward of a patched module keeps a reference to this object. Removing the scheme marks the
    object as retired, and such a wrapper then runs the stock forward.

    Args:
        module: the module.
        runtime: the runtime of its stack, if the forward needs it.

    Attributes:
        inner: a forward that was set on the instance before, or `None` for the forward of its class.
        retired: whether the scheme has been removed.
    """

    runtime: StackRuntime
    inner: Any = None
    retired = False

    def __init__(self, module: Any, runtime: Any = None) -> None:
        self.module = module
        self.runtime = runtime

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of the module without the scheme."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def place_of_forward(module: nn.Module) -> str:
    """The attribute that holds a module's forward, which is the one inside accelerate's hook for hooked modules."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def forward_on_instance(module: nn.Module) -> Any:
    """The forward that was set on the instance, by this package or another one; `None` if the class's forward runs.

    A tool may restore a `PlacedForward` after its scheme was removed. Such a retired object is skipped in favour of
    the forward inside it.
    """
    place = place_of_forward(module)
    found = module.__dict__.get(place)
    while isinstance(found, PlacedForward) and found.retired:
        found = found.inner
    # If no forward was set on the instance, accelerate stores a bound method of the class inside its hook.
    is_stock = place == "_old_forward" and getattr(found, "__func__", None) is type(module).forward
    return None if is_stock else found


def refuse_foreign_forward(module: nn.Module, path: str = "") -> None:
    """Refuses a module whose forward was replaced by another library, because a scheme would bypass it.

    Args:
        module: the module.
        path: its path in the model, for the message.

    Raises:
        UnsupportedError: if its forward was replaced.
    """
    found = forward_on_instance(module)
    if found is not None and not isinstance(found, PlacedForward):
        name = f"{path} ({type(module).__name__})" if path else f"This {type(module).__name__}"
        raise UnsupportedError(
            f"{name} has a forward that another library, or your code, has set on the instance. A position encoding "
            "would bypass it. If the model is patched, call unpatch_model(model) first, which works with that forward "
            "in place. Then remove that forward (with the library that set it, or `del module.forward`), patch the "
            "model, and wrap the forward that the module has then."
        )


class ZeroOutput(PlacedForward):
    """Stands in for the `forward` of a linear layer, or of a network that ends with one."""

    def __call__(self, inputs: Tensor) -> Any:
        """Returns zeros `(..., out_features)`."""
        if self.retired:
            return self.stock(inputs)
        width = getattr(self.module, "out_features", None) or [*self.module.parameters()][-1].shape[0]
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], width)


def unrotated(heads: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for a method that rotates its first argument, and returns it unchanged."""
    return heads
