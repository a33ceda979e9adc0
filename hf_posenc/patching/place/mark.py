"""The entry of a state dict that says which scheme the weights beside it were trained with.

Many schemes have no parameters, so without it the weights of an ALiBi model and of a stock model have the same keys.
The entry is torch's extra state of `PositionEncoding`: bytes that are made from the config whenever a state dict is,
so casts, device moves, averaging and quantisation, which act on parameters and buffers, cannot change it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.entry import FORMAT, is_entry
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.registry import scheme_from_dict


def mark_of(config: SchemeConfig) -> Tensor:
    """The entry for a scheme: JSON as `(bytes,)` in uint8, on the CPU, equal for equal configs."""
    entry = {"format": FORMAT, "scheme": config.to_dict()}
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def marked_scheme(mark: Any) -> dict[str, Any]:
    """The scheme dictionary in a mark; `{"scheme": "?"}` for bytes that are none, which equals no scheme."""
    try:
        local = mark.to_local() if hasattr(mark, "to_local") else mark
        entry = json.loads(bytes(local.detach().cpu().to(torch.uint8).flatten().tolist()))
    except (AttributeError, ValueError, RuntimeError):
        entry = None
    return entry["scheme"] if is_entry(entry) else {"scheme": "?"}


def same_scheme(found: Mapping[str, Any], config: SchemeConfig) -> bool:
    """Whether a scheme dictionary describes a config; options that it lacks have their defaults."""
    try:
        return scheme_from_dict(dict(found)) == config
    except (ValueError, TypeError, KeyError):
        return False


def described(scheme: Mapping[str, Any]) -> str:
    """A scheme with the options that are not defaults: `t5(max_distance=64)`."""
    options = _chosen(scheme)
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{scheme['scheme']}({shown})" if shown else str(scheme["scheme"])


def _chosen(scheme: Mapping[str, Any]) -> dict[str, Any]:
    try:
        defaults = type(scheme_from_dict(dict(scheme)))().to_dict()
    except (ValueError, TypeError, KeyError):
        defaults = {}
    absent = object()
    return {name: value for name, value in scheme.items() if name != "scheme" and defaults.get(name, absent) != value}


def disagreement(found: Mapping[str, Any] | None, config: SchemeConfig | None) -> str | None:
    """How weights and a model differ, and what makes them agree; `None` where they do.

    Args:
        found: the scheme the weights name; `None` for weights without a mark.
        config: the scheme in force; `None` for a stock model.
    """
    here = "its stock positions" if config is None else f"the position encoding {described(config.to_dict())}"
    if found is None:
        if config is None:
            return None
        return (
            f"these weights name no position encoding, like those of a stock model, and this model has {here}. To put "
            "the scheme on top of stock weights, load them before patch_model"
        )
    if config is not None and same_scheme(found, config):
        return None
    remedy = {"scheme": found["scheme"]} | _chosen(found)
    return (
        f"these weights were trained with the position encoding {described(found)}, and this model has {here}. Call "
        f"patch_model(model, {remedy!r}) before loading them; to give them another scheme, patch once more afterwards"
    )


#: What a strict `load_state_dict` adds to a disagreement.
NOT_STRICT = (
    "To take over the weights alone, pass strict=False (options=StateDictOptions(strict=False) to the functions of "
    "torch.distributed.checkpoint.state_dict)"
)


def placed_mark(mark: Tensor, module: nn.Module) -> Tensor:
    """A mark among the weights of a module: a `DTensor` where they are, because what loads those takes nothing else.

    Every process has the whole of it, so nothing is sent.
    """
    mesh = next((parameter.device_mesh for parameter in module.parameters() if hasattr(parameter, "device_mesh")), None)
    if mesh is None:
        return mark
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(mark, mesh, [Replicate()] * mesh.ndim, run_check=False)
