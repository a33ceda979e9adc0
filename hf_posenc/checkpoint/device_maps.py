"""Device maps: the parts of a scheme stand where the layers stand that use them, so a map needs no entry for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_posenc.wrapping import Call, wrap

if TYPE_CHECKING:
    from torch import nn

#: Where accelerate keeps weights that it loads for each call. The parts of a scheme are too small for that.
_OFFLOADED = ("cpu", "disk")


def install() -> None:
    """Wraps the functions that read a device map. Calling it again changes nothing."""
    wrap("accelerate.big_modeling", {"dispatch_model": _dispatch})
    wrap("transformers.integrations.accelerate", {"_get_device_map": lambda call: completed(call["model"], call.run())})


def with_parts(call: Call) -> Call:
    """A call with `model` and `device_map`, its map completed."""
    device_map = completed(call["model"], call["device_map"])
    return call if device_map is call["device_map"] else call.changed(device_map=device_map)


def completed(model: nn.Module, device_map: Any) -> Any:
    """A device map of the stock model, with entries for the parts of the scheme instead of those that it may have.

    Args:
        model: the model.
        device_map: devices by the names of modules. Anything else is returned as it is, and so is the map of a model
            without a scheme, or on one device.
    """
    if "hf_posenc.patching" not in sys.modules or not isinstance(device_map, Mapping) or "" in device_map:
        return device_map
    from hf_posenc.patching.place.encoding import current_encoding

    encoding = current_encoding(model)
    if encoding is None:
        return device_map
    names = {id(module): name for name, module in model.named_modules()}
    prefix = names[id(encoding)]
    stock = {name: device for name, device in device_map.items() if not f"{name}.".startswith(f"{prefix}.")}
    first = next((device for device in stock.values() if device not in _OFFLOADED), None)
    if first is None:
        return device_map
    own = {prefix: first}
    for stack in encoding.record.stacks.values():
        for attention, layer in zip(stack.attentions, stack.encoding.layers, strict=True):
            device = _device_of(names[id(attention)], stock)
            for module in (module for part in layer.parts for module in part.modules()):
                if id(module) in names:
                    own.setdefault(names[id(module)], first if device in _OFFLOADED else device)
    return stock | own


def _device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of a module: that of the longest name in the map that leads to it."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def _dispatch(call: Call) -> Any:
    dispatched = (changed := with_parts(call)).run()
    if changed is not call:
        from accelerate.hooks import remove_hook_from_module

        from hf_posenc.patching.place.encoding import current_encoding

        # The parts are where they are used, and so are their inputs.
        remove_hook_from_module(current_encoding(call["model"]), recurse=True)
    return dispatched
