"""Forwards that stand in for those of single module instances, ours and those of others."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError


class PlacedForward:
    """Stands in for the `forward` of one module instance while a scheme is in place.

    Whoever wraps a patched module's forward keeps a reference to the one that stands in. Taking the scheme out retires
    it, so that such a wrapper goes on around the stock forward.

    Attributes:
        module: the module.
        inner: a forward that somebody had put on the instance before, or `None` for that of its class.
        retired: whether the scheme has been taken out.
    """

    module: Any
    inner: Any = None
    retired = False

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes without a scheme."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def place_of_forward(module: nn.Module) -> str:
    """The attribute that holds a module's forward: where accelerate has hooked the module, the one inside its hook."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def forward_on_instance(module: nn.Module) -> Any:
    """The forward that was set on the instance, ours or another one; `None` where that of its class runs.

    A retired one of ours, which a tool may put back long after the scheme is gone, stands for what is inside it.
    """
    found = module.__dict__.get(place_of_forward(module))
    while isinstance(found, PlacedForward) and found.retired:
        found = found.inner
    # accelerate keeps a bound method inside its hook where there was nothing.
    hooked = place_of_forward(module) == "_old_forward"
    return None if hooked and getattr(found, "__func__", None) is type(module).forward else found


def refuse_foreign_forward(module: nn.Module, path: str = "") -> None:
    """Refuses a module that runs a forward of somebody else, which a scheme would pass over.

    Args:
        module: the module.
        path: where it is in the model, for the message.

    Raises:
        UnsupportedError: if it does.
    """
    found = forward_on_instance(module)
    if found is not None and not isinstance(found, PlacedForward):
        name = f"{path} ({type(module).__name__})" if path else f"This {type(module).__name__}"
        raise UnsupportedError(
            f"{name} has a forward of its own, set on the instance by another library or by hand; a position encoding "
            "put in its place would pass it over. If the model is patched, call unpatch_model(model) first: it works "
            "with that forward in place. Then take that forward off (`del module.forward`, unless its tool has a way "
            "of its own), patch the model, and put it on again."
        )
