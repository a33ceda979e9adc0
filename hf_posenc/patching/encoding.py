"""The module that holds a scheme inside a model: its config, its parts and the report."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.attention_site import LayerEncoding
from hf_posenc.patching.instance import InstancePatches
from hf_posenc.patching.report import PatchReport
from hf_posenc.patching.rotary_calls import (
    has_inverse_frequencies,
    has_layer_types,
    inverse_frequencies_of,
    pairing,
    rotary_output,
    rotating_layer_types,
)
from hf_posenc.patching.runtime import StackRuntime
from hf_posenc.patching.sites import FoundAttention, Stack
from hf_posenc.patching.table_site import table_origin, table_weight
from hf_posenc.schemes import ComposedConfig, ScheduleConfig
from hf_posenc.schemes.base import AdditiveEncoding, BuildContext, SchemeConfig


class StackEncoding(nn.Module):
    """The parts of a scheme in one stack; parts that layers share are held once.

    Args:
        config: the scheme, or a schedule of schemes.
        stack: where it is placed.
        inverse: the architecture's rotary method, where it has one instead of a function.

    Raises:
        UnsupportedError: if the layers of a schedule disagree about what is added to the embeddings.
    """

    def __init__(self, config: SchemeConfig, stack: Stack, pairing_override: str | None = None) -> None:
        super().__init__()
        self.runtime = StackRuntime()
        self.groups = nn.ModuleList()
        self.additive: AdditiveEncoding | None = None
        self.layers: list[LayerEncoding] = []
        self._build(config, stack, pairing_override)

    def _build(self, config: SchemeConfig, stack: Stack, pairing_override: str | None) -> None:
        built: dict[Hashable, tuple[Any, Any]] = {}
        additive_layers: dict[SchemeConfig, AdditiveEncoding | None] = {}
        for attention in stack.attentions:
            layer_config = config.for_layer(attention.layer) if isinstance(config, ScheduleConfig) else config
            context = build_context(stack, attention)
            layer_config = with_layout(layer_config, stack, attention, pairing_override)
            key = (layer_config, context, attention.path if layer_config.per_layer else None)
            if key not in built:
                parts = layer_config.build(context)
                additive_layers.setdefault(layer_config, parts.additive)
                built[key] = (parts.query_key_map, parts.logit_bias)
                shared = [part for part in built[key] if part is not None]
                if shared:
                    self.groups.append(nn.ModuleList(shared))
            query_key_map, logit_bias = built[key]
            self.layers.append(
                LayerEncoding(query_key_map, logit_bias, attention.causal, attention.num_heads, attention.head_dim)
            )
        self.additive = _one_additive(additive_layers)
        self._check_shared_keys(stack)

    def _check_shared_keys(self, stack: Stack) -> None:
        """Layers that read an earlier layer's keys find them mapped by that layer's scheme (Gemma 3n and 4)."""
        owners: dict[str | None, tuple[int, Any]] = {}
        for attention, layer in zip(stack.attentions, self.layers, strict=True):
            if not getattr(attention.module, "is_kv_shared_layer", False):
                owners[attention.layer_type] = (attention.layer, layer.query_key_map)
                continue
            source, query_key_map = owners.get(attention.layer_type, (None, layer.query_key_map))
            if query_key_map is not layer.query_key_map:
                raise UnsupportedError(
                    f"Layer {attention.layer} reads the keys of layer {source}, so both need the same rotation; the "
                    "schedule gives them different ones."
                )

    def adopt(self, stack: Stack, native_bias: Any) -> list[str]:
        """Takes over native weights where a part can; returns what was adopted."""
        adopted = []
        if self.additive is not None and stack.tables:
            table = stack.tables[0]
            weight = table_weight(table.module)
            offset = max(getattr(part, "offset", 0) for part in self.additive.modules())
            skip = max(table_origin(table.module) - offset, 0)
            if weight is not None and weight.device.type != "meta" and self.additive.adopt(weight[skip:]):
                adopted.append(f"additive: {table.path}")
        for attention, layer in zip(stack.attentions, self.layers, strict=True):
            native = native_bias(stack, attention)
            if layer.logit_bias is None or native is None or native.device.type == "meta":
                continue
            if layer.logit_bias.adopt(native):
                adopted.append(f"logit_bias: {attention.path}")
        return adopted


class PositionEncoding(nn.Module):
    """Everything `patch_model` put into a model; reachable as `model.position_encoding`.

    Attributes:
        config: the scheme in force.
        report: what was replaced and what was placed.
        stacks: the parts, by name of the stack.
    """

    def __init__(self, config: SchemeConfig, stacks: dict[str, StackEncoding]) -> None:
        super().__init__()
        self.config = config
        self.report: PatchReport | None = None
        self.stacks = nn.ModuleDict(stacks)
        self.journal = InstancePatches()
        self.hooks: list[Any] = []

    def extra_repr(self) -> str:
        """The scheme, for `print(model)`."""
        return repr(self.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionEncoding:
        """Copies the encoding as a part of its model.

        Raises:
            UnsupportedError: for a copy of the encoding alone (PEFT's `modules_to_save`), which no layer would use.
        """
        holder = self.__dict__.get("holder")
        if holder is not None and id(holder) not in memo:
            raise UnsupportedError(
                "A copy of position_encoding without its model would be trained and saved, but no layer would use it. "
                "To train a scheme beside LoRA, leave it out of `modules_to_save`, set requires_grad on the parameters "
                "of model.position_encoding after get_peft_model, and save merge_and_unload()."
            )
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


def build_context(stack: Stack, attention: FoundAttention) -> BuildContext:
    """What a part may know about one attention layer."""
    config = stack.config
    max_positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if stack.tables:
        weight = table_weight(stack.tables[0].module)
        assert weight is not None
        max_positions = weight.shape[0] - table_origin(stack.tables[0].module)
    deviation = getattr(config, "initializer_range", None) or getattr(config, "init_std", None)
    return BuildContext(
        hidden_size=stack.hidden_size,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        rotary_dim=native_rotary_dim(stack, attention),
        causal=attention.causal,
        max_positions=max_positions if isinstance(max_positions, int) and max_positions > 0 else None,
        initializer_range=deviation if isinstance(deviation, float) and deviation > 0 else 0.02,
    )


def native_rotary_dim(stack: Stack, attention: FoundAttention) -> int | None:
    """How many dimensions of a head the architecture rotates in this layer; `None` where it rotates none."""
    if not attention.rotary_functions:
        return None
    own = getattr(attention.module, "rotary_dim", None)
    if not stack.rotaries:
        return own if isinstance(own, int) and own > 0 else None
    rotary = stack.rotaries[0].module
    if not has_inverse_frequencies(rotary, attention.layer_type) and has_layer_types(rotary):
        # An architecture may leave layers of one type without rotation.
        return None
    return 2 * int(inverse_frequencies_of(rotary, attention.layer_type).shape[-1])


def with_layout(
    config: SchemeConfig, stack: Stack, attention: FoundAttention, pairing_override: str | None
) -> SchemeConfig:
    """The config with `layout="auto"` resolved to the pairing the architecture was trained with."""
    if isinstance(config, ComposedConfig):
        parts = tuple(with_layout(part, stack, attention, pairing_override) for part in config.parts)
        return dataclasses.replace(config, parts=parts)
    if getattr(config, "layout", None) != "auto" or not hasattr(config, "rotary_dim"):
        return config
    rotary: Any = config
    return dataclasses.replace(rotary, layout=pairing_override or native_pairing(stack, attention) or "half")


def native_pairing(stack: Stack, attention: FoundAttention) -> str | None:
    """The pairing of the layer's own rotary function, or `None` where it has none."""
    if not attention.rotary_functions:
        return None
    forward = inspect.unwrap(type(attention.module).forward)
    function = forward.__globals__[native_rotary_function(attention)]
    kind = "full"
    if stack.rotaries:
        rotary = stack.rotaries[0].module
        known = [attention.layer_type, *rotating_layer_types(rotary)]
        known = [layer_type for layer_type in known if has_inverse_frequencies(rotary, layer_type)]
        if known or not has_layer_types(rotary):
            kind, _ = rotary_output(rotary, layer_type=known[0] if known else None)
    return pairing(function, kind)


def native_rotary_function(attention: FoundAttention) -> str:
    """The rotary function a layer uses; where its code names two, the one its config chooses."""
    names = attention.rotary_functions
    if len(names) == 1:
        return names[0]
    interleave = getattr(attention.module.config, "rope_interleave", None)
    matching = [name for name in names if ("interleave" in name) == bool(interleave)]
    if interleave is None or len(matching) != 1:
        raise UnsupportedError(
            f"{attention.path} calls several rotary functions ({', '.join(names)}) and its config does not say which."
        )
    return matching[0]


def _one_additive(found: dict[SchemeConfig, AdditiveEncoding | None]) -> AdditiveEncoding | None:
    if len(found) <= 1:
        return next(iter(found.values()), None)
    additives = [part for part in found.values() if part is not None]
    if not additives:
        return None
    raise UnsupportedError(
        "The layers of the schedule disagree about what is added to the embeddings "
        f"({', '.join(config.name for config in found)}). An additive scheme acts once, before the first layer, so it "
        "has to be the same in every layer; rotations and biases can differ."
    )


def parameter_count(module: nn.Module) -> int:
    """Number of scalars that can be learned."""
    return sum(parameter.numel() for parameter in module.parameters())


def execution_device(model: nn.Module) -> torch.device:
    """Where a model computes: for weights that accelerate keeps elsewhere, the device its hooks bring them to."""
    for module in model.modules():
        device = getattr(module.__dict__.get("_hf_hook"), "execution_device", None)
        if device is not None:
            return torch.device(device)
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def place_like(module: nn.Module, model: nn.Module) -> None:
    """Moves `module` to where `model` computes, in its dtype."""
    reference = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    module.to(device=execution_device(model), dtype=None if reference is None else reference.dtype)
