"""Spreading a model over the two strict devices, as `device_map="auto"` does it with two GPUs."""

from __future__ import annotations

import tempfile
from typing import Any

from accelerate import dispatch_model
from torch import nn

from tests.devices.strict_device import NAME

#: Where the layers of the second half go. Those of the first half are on the first device.
PLACEMENTS = {"split": f"{NAME}:1", "cpu": "cpu", "disk": "disk"}
_FIRST = f"{NAME}:0"
#: What `--placement` says.
placement = "one"


def device_map(model: Any, placement: str) -> dict[str, str]:
    """A device for each module: that of the layer before it, and heads whose weights are tied to embeddings with them.

    Args:
        model: the model.
        placement: of `PLACEMENTS`.
    """
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    second = {id(layer) for layer in layers[(len(layers) + 1) // 2 :]}
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is getattr(model.get_input_embeddings(), "weight", None)
    found: dict[str, str] = {}
    last = _FIRST

    def place(module: nn.Module, prefix: str) -> None:
        nonlocal last
        for name, child in module.named_children():
            inside = [one for one in layers if any(one is below for below in child.modules())]
            if inside and inside != [child]:
                place(child, f"{prefix}{name}.")
                continue
            if inside:
                last = PLACEMENTS[placement] if id(child) in second else _FIRST
            with_embeddings = tied and any(one is head for one in child.modules())
            found[f"{prefix}{name}"] = _FIRST if with_embeddings else last
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[f"{prefix}{name}"] = _FIRST

    place(model, "")
    return found


def spread(model: Any) -> Any:
    """The model, its layers placed as `--placement` says; as it is without that option."""
    if placement == "one":
        return model
    placed = device_map(model, placement)
    if len(set(placed.values())) == 1:
        return model.to(_FIRST)
    return dispatch_model(model, placed, main_device=_FIRST, offload_dir=tempfile.mkdtemp())
