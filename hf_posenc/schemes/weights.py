"""How learned weights start, tables that take over a stock table, copies of initial weights, and stacked weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def stacked(layers: Sequence[Any]) -> Any:
    """A copy of the first of several parts of one class whose weights are those of all, `(layers, ...)`.

    Gradients flow back to the parts. Each of them has an entry in the copy even if it is the only one.
    """
    made = copy.copy(layers[0])
    state: dict[str, Any] = dict(made.__dict__)
    made.__dict__ = state
    state["_parameters"] = {
        name: torch.stack([layer._parameters[name] for layer in layers]) for name in made._parameters
    }
    state["_modules"] = {name: stacked([layer._modules[name] for layer in layers]) for name in made._modules}
    return made


def of_stacked(layers: Sequence[Any], *inputs: Any) -> Tensor:
    """What several layers compute together, by a `forward` that takes weights with an axis of layers in front."""
    result: Tensor = stacked(layers).forward(*inputs)
    return result


@torch.no_grad()
def copied_(weight: Tensor, values: Tensor) -> None:
    """Sets a weight to the values that it starts with, which are on the CPU."""
    weight.copy_(values)


class LearnedWeights(nn.Module):
    """Base class of modules that state with each parameter how it starts."""

    #: What fills each parameter, by name.
    _starts: dict[str, Callable[[Tensor], object]]

    def learned(
        self, name: str, shape: int | Sequence[int], start: Callable[..., object] = nn.init.normal_, **options: Any
    ) -> nn.Parameter:
        """A new parameter, which `start` fills now and in `reset_parameters`.

        Args:
            name: the attribute that holds it.
            shape: its sizes.
            start: takes the parameter and the options, like the functions of `torch.nn.init`.
            **options: those of `start`.

        Raises:
            TypeError: in a class that overrides `reset_parameters`, which would not be called.
        """
        if type(self).reset_parameters is not LearnedWeights.reset_parameters:
            raise TypeError(
                f"{type(self).__name__} overrides reset_parameters, which would be ignored: a weight starts as the "
                "call of `learned` that makes it states. Override `learned`, or make all weights of the part yourself."
            )
        parameter = nn.Parameter(torch.empty(shape))
        starts = vars(self).setdefault("_starts", {})
        starts[name] = functools.partial(start, **options)
        starts[name](parameter)
        return parameter

    def reset_parameters(self) -> None:
        """Starts the learned parameters of this part again, for example after it was built on the meta device."""
        for name, start in vars(self).get("_starts", {}).items():
            start(getattr(self, name))


class NativeTable(nn.Module):
    """Mixin of parts with one table, which takes over a stock table of the same shape."""

    weight: nn.Parameter

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies a stock table of the same shape."""
        if native.shape != self.weight.shape:
            return False
        self.weight.copy_(native)
        return True
