"""Spreading a model over two devices, as `device_map="auto"` does it with two GPUs."""

from __future__ import annotations

import tempfile
from typing import Any

from accelerate import dispatch_model
from torch import nn

#: What `--device` says, if it names devices that tests may spread models over: "strict" or "cuda".
device = ""
#: What `--placement` says: all layers on the first device, or those of the second half elsewhere.
placement = "one"


def first() -> str:
    """The device of the layers of the first half."""
    return f"{device}:0"


def second(placement: str) -> str:
    """Where a placement puts the layers of the second half."""
    return {"split": f"{device}:1", "cpu": "cpu", "disk": "disk"}[placement]


def device_map(model: Any, placement: str, half: int = 1) -> dict[str, str]:
    """A device for each module: that of the layer before it, and heads whose weights are tied to embeddings with them.

    Args:
        model: the model.
        placement: "split", "cpu" or "disk".
        half: which half of the layers is elsewhere. With 0, no layer is where the inputs are made.
    """
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    middle = (len(layers) + 1) // 2
    elsewhere = {id(layer) for layer in (layers[middle:] if half else layers[:middle])}
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is getattr(model.get_input_embeddings(), "weight", None)
    found: dict[str, str] = {}
    last = first()

    def place(module: nn.Module, prefix: str) -> None:
        nonlocal last
        for name, child in module.named_children():
            inside = [one for one in layers if any(one is below for below in child.modules())]
            if inside and inside != [child]:
                place(child, f"{prefix}{name}.")
                continue
            if inside:
                last = second(placement) if id(child) in elsewhere else first()
            with_embeddings = tied and any(one is head for one in child.modules())
            found[f"{prefix}{name}"] = first() if with_embeddings else last
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[f"{prefix}{name}"] = first()

    place(model, "")
    return found


def spread(model: Any) -> Any:
    """The model, its layers placed as `--placement` says; as it is without that option."""
    if placement == "one":
        return model
    placed = device_map(model, placement)
    if len(set(placed.values())) == 1:
        return model.to(first())
    return dispatch_model(model, placed, main_device=first(), offload_dir=tempfile.mkdtemp())
