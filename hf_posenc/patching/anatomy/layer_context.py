"""Properties of an attention layer that a scheme is built from: sizes, lengths, and the native rotation."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.rotary_functions import (
    grid_pairing,
    has_inverse_frequencies,
    has_layer_types,
    inverse_frequencies_of,
    pairing,
    rotary_output,
    rotating_layer_types,
)
from hf_posenc.patching.anatomy.sites import AttentionLayer, Stack
from hf_posenc.schemes.config import BuildContext, SchemeConfig


def build_context(stack: Stack, attention: AttentionLayer) -> BuildContext:
    """The `BuildContext` of one attention layer."""
    config = stack.config
    max_positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    table = stack.layout.table(stack)
    max_positions = max_positions if table is None else table.shape[0]
    logit_terms = stack.architecture.logit_terms
    deviation = getattr(config, "initializer_range", None) or getattr(config, "init_std", None)
    return BuildContext(
        hidden_size=stack.hidden_size,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        rotary_dim=native_rotary_dim(stack, attention),
        causal=attention.causal,
        max_positions=max_positions if isinstance(max_positions, int) and max_positions > 0 else None,
        num_key_value_heads=attention.num_key_value_heads,
        # Zamba's shared layers read the embeddings in addition to the hidden states.
        layer_input_size=getattr(attention.module, "attention_hidden_size", None),
        initializer_range=deviation if isinstance(deviation, float) and deviation > 0 else 0.02,
        logit_terms=1 if logit_terms is None else logit_terms(attention.module),
    )


def native_rotary_dim(stack: Stack, attention: AttentionLayer) -> int | None:
    """The number of dimensions of a head that the architecture rotates in this layer; `None` if it rotates none."""
    if not attention.rotary_functions:
        return None
    if stack.layout.has_axes:
        return None  # Rotations on a grid use whole heads, and their modules have frequencies for one axis of several.
    own = getattr(attention.module, "rotary_dim", None)
    own = own if isinstance(own, int) and own > 0 else None
    if not stack.rotaries:
        return own
    rotary = stack.rotaries[0].module
    if has_inverse_frequencies(rotary, attention.layer_type):
        return 2 * int(inverse_frequencies_of(rotary, attention.layer_type).shape[-1])
    # Some architectures do not rotate in layers of one type.
    return None if has_layer_types(rotary) else own or rotary_output(rotary)[1]


def execution_device(module: nn.Module) -> torch.device:
    """The device of a module; for weights offloaded by accelerate, the device on which they are executed."""
    for one in module.modules():
        device = getattr(one.__dict__.get("_hf_hook"), "execution_device", None)
        if device is not None:
            return torch.device(device)
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def with_layout(config: SchemeConfig, stack: Stack, attention: AttentionLayer) -> SchemeConfig:
    """The config with every unset layout replaced by the pairing that the architecture was trained with."""
    children = config.children().items()
    config = config.with_children({place: with_layout(child, stack, attention) for place, child in children})
    if not config.leaves_layout_open:
        return config
    rotary: Any = config
    return dataclasses.replace(rotary, layout=stack.architecture.pairing or native_pairing(stack, attention) or "half")


def native_pairing(stack: Stack, attention: AttentionLayer) -> str | None:
    """The pairing of the layer's native rotary function, or `None` if it has none."""
    if not attention.rotary_functions:
        return None
    forward = inspect.unwrap(type(attention.module).forward)
    function = forward.__globals__[native_rotary_function(attention)]
    kind = "full"
    if stack.layout.has_axes:
        return grid_pairing(function)
    if stack.rotaries:
        rotary = stack.rotaries[0].module
        known = [attention.layer_type, *rotating_layer_types(rotary)]
        known = [layer_type for layer_type in known if has_inverse_frequencies(rotary, layer_type)]
        if known or not has_layer_types(rotary):
            kind, _ = rotary_output(rotary, layer_type=known[0] if known else None)
    return pairing(function, kind)


def native_rotary_function(attention: AttentionLayer) -> str:
    """The name of the rotary function that a layer uses; if its code has two, the one its config selects."""
    names = attention.rotary_functions
    if len(names) == 1:
        return names[0]
    interleave = getattr(attention.module.config, "rope_interleave", None)
    matching = [name for name in names if ("interleave" in name) == bool(interleave)]
    if interleave is None or len(matching) != 1:
        raise UnsupportedError(
            f"{attention.path} has several rotary functions ({', '.join(names)}), and its config does not show which "
            "one is used."
        )
    return matching[0]
