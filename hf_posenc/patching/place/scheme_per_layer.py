"""The scheme of every layer, from the arguments `layers` and `elsewhere` of `patch_model`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.schemes import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.config import SchemeConfig


def schedule(
    config: SchemeConfig,
    stacks: list[Stack],
    layers: Iterable[int] | None,
    elsewhere: SchemeConfig | None,
    *,
    merged: bool = False,
) -> SchemeConfig:
    """`config` in some layers and `elsewhere` in the others.

    Args:
        config: the scheme of `layers`.
        stacks: the model's stacks.
        layers: indices of layers, counted as in `model.layers`; `None` for all.
        elsewhere: the scheme of the other layers; may itself be a schedule.
        merged: whether `config` may be a schedule too, of which only `layers` are taken.

    Raises:
        TypeError: for layers that are not given by their indices.
        ValueError: for a layer that the model does not have, or that has no attention.
    """
    if isinstance(config, ScheduleConfig):
        deepest = max(layer for stack in stacks for layer in stack.layers())
        if len(config.layers) > deepest + 1:
            raise ValueError(
                f"The schedule has {len(config.layers)} layers, but the last layer with attention in this model is "
                f"{deepest}."
            )
    if layers is None:
        _check_all_occur(config, stacks)
        return config
    chosen = _indices(layers)
    available = sorted({layer for stack in stacks for layer in stack.layers()})
    unknown = [layer for layer in chosen if layer not in available]
    if unknown or not chosen:
        raise ValueError(
            f"layers={chosen} contains {unknown or 'no layer'}; layers with self-attention are {available}."
        )
    if isinstance(config, LayeredConfig) and not merged:
        raise ValueError(
            "A schedule already defines the scheme of every layer, so `layers` cannot be combined with it."
        )
    assert elsewhere is not None
    types = {attention.layer: attention.layer_type for stack in stacks for attention in stack.attentions}
    wanted = enumerate(config if layer in chosen else elsewhere for layer in range(available[-1] + 1))
    placed = (one.for_layer(at, types.get(at)) if isinstance(one, LayeredConfig) else one for at, one in wanted)
    return ScheduleConfig(layers=tuple(placed))


def _indices(layers: Any) -> list[int]:
    """The indices in `layers`, sorted. Numbers of NumPy and torch count as indices; a mask does not."""
    given = layers.tolist() if hasattr(layers, "tolist") else layers
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"`layers` must be a collection of layer indices, for example layers=[0, 1]; got {layers!r}.")
    values = [value.item() if hasattr(value, "item") else value for value in given]
    for wrong in [value for value in values if isinstance(value, bool) or not isinstance(value, int)]:
        mask = " For a mask, pass layers=[layer for layer, chosen in enumerate(mask) if chosen]."
        raise TypeError(
            f"`layers` holds {wrong!r} ({type(wrong).__name__}), which is not the index of a layer."
            f"{mask if isinstance(wrong, bool) else ''}"
        )
    return sorted(set(values))


def _check_all_occur(config: SchemeConfig, stacks: list[Stack]) -> None:
    """Refuses an arrangement with a scheme that no layer would use."""
    if not isinstance(config, LayeredConfig) or isinstance(config, ScheduleConfig):
        return
    attentions = [attention for stack in stacks for attention in stack.attentions]
    used = {config.for_layer(attention.layer, attention.layer_type) for attention in attentions}
    for option, scheme in config.children().items():
        if scheme not in used:
            layers = sorted({attention.layer for attention in attentions})
            raise ValueError(
                f"{type(config).__name__}.{option} ({scheme.name!r}) would not be used in any layer: the layers with "
                f"attention are {layers}. Change the layers that get it, or use a ScheduleConfig."
            )
