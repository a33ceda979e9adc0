"""Traces that a patch could leave."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def trace_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything a patch could leave behind: on instances, on classes, in modules, in weights and in the config."""
    trace: dict[str, Any] = {"config": (type(model.config), model.config.to_dict())}
    classes = {type(module) for module in model.modules()}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("hooks") and isinstance(value, dict)]
        trace[f"instance {name}"] = (sorted(own), hooks, list(module._modules), list(module._buffers), type(module))
    for name, tensor in model.state_dict().items():
        trace[f"weight {name}"] = tensor.clone()
    for name, parameter in model.named_parameters():
        trace[f"requires_grad {name}"] = parameter.requires_grad
    for one in classes:
        trace[f"class {one}"] = {key: id(value) for key, value in vars(one).items() if _is_kept(key)}
        if one.__module__.startswith("transformers"):
            values = vars(sys.modules[one.__module__])
            trace[f"module {one.__module__}"] = {key: id(value) for key, value in values.items()}
    return trace


def _is_kept(name: str) -> bool:
    """Whether an attribute of a class says something; transformers caches an answer on classes."""
    return not name.startswith("__") and not name.endswith("_cached_value")


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    if before.keys() != after.keys():
        return f"entries {sorted(before.keys() ^ after.keys())[:4]}"
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        if not same:
            return f"{key} {_changed(value, after[key])}".strip()
    return ""


def _changed(before: Any, after: Any) -> str:
    """Which entries of a dictionary changed."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    names = [str(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return ", ".join(sorted(names)[:4])
