"""Weights that are not where they are used: offloaded to the CPU or to disk by accelerate, or on another device."""

from __future__ import annotations

import copy
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)
#: What accelerate's hooks set on a module.
_HOOKED = ("_hf_hook", "_old_forward", "forward")


class onload_weights:
    """Loads the offloaded weights of a part to its execution device inside a `with` block.

    accelerate's hooks do this around `forward` only, and a patched model calls other methods of a part too.

    Args:
        part: the part whose methods are called in the block.
    """

    def __init__(self, part: nn.Module) -> None:
        # Most parts have no submodules, and iterating over `modules()` in every layer slows decoding down.
        modules = part.modules() if part._modules else (part,)
        self.hooked = [module for module in modules if "_hf_hook" in module.__dict__]

    def __enter__(self) -> None:
        for module in self.hooked:
            module.__dict__["_hf_hook"].pre_forward(module)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module in self.hooked:
            module.__dict__["_hf_hook"].post_forward(module, None)


def copied_to(part: Module, device: torch.device) -> Module:
    """A copy of a part that computes with copies of its weights on `device`.

    Gradients flow back through the copies. A copy does not outlive the forward call for which it is made, because the
    weights may change after it.
    """
    with onload_weights(part):
        return _copied(part, device)


def _copied(module: Module, device: torch.device) -> Module:
    made = copy.copy(module)
    state: dict[str, Any] = dict(module.__dict__)
    made.__dict__ = state
    if "_hf_hook" in state:
        for name in _HOOKED:
            state.pop(name, None)
    if getattr(state.get("forward"), "__self__", None) is module:
        # accelerate leaves it behind when it removes a hook.
        del state["forward"]
    for kind in ("_parameters", "_buffers"):
        state[kind] = {name: None if weight is None else weight.to(device) for name, weight in state[kind].items()}
    state["_modules"] = {name: None if one is None else _copied(one, device) for name, one in module._modules.items()}
    return made
