"""What a call of `patch_model` asks for: the scheme of every layer, with what it takes from the native one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError, warn_user
from hf_posenc.patching.anatomy.rotary_functions import AXES, number_of_axes, reads_axes
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.schemes import LayeredConfig, MRopeConfig, ScheduleConfig
from hf_posenc.schemes.arrangement.native import asked_scalings, names_native, with_native
from hf_posenc.schemes.config import SchemeConfig, walk
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.rotary.scaling import RopeScaling

_SPECTRUM = ("theta", "inverse_frequencies", "rotary_dim", "layout")
_ASSIGNMENT = ("sections", "interleaved", "axes")


def resolve_native(
    config: SchemeConfig, stacks: list[Stack], native_scheme: Callable[[], SchemeConfig]
) -> SchemeConfig:
    """`config` with the native scheme in place of every `NativeConfig`.

    Warns if a scaling that the model has is replaced.

    Args:
        config: the scheme that the caller asks for.
        stacks: the stacks that get it.
        native_scheme: determines the native scheme of these stacks.

    Raises:
        UnsupportedError: if the native scheme is unknown; for a scaling of a model whose attention reads it elsewhere.
        ValueError: for a scaling of a native scheme that cannot have it.
    """
    if not names_native(config):
        return config
    native = native_scheme()
    types = {attention.layer: attention.layer_type for stack in stacks for attention in stack.attentions}
    resolved = with_native(config, native, [types.get(layer) for layer in range(max(types) + 1)])
    asked = asked_scalings(config)
    if asked:
        _refuse_scaled_softmax(stacks, asked)
        own = {scaling for one in walk(native) if (scaling := getattr(one, "scaling", None)) is not None}
        replaced = own - {getattr(one, "scaling", None) for one in walk(resolved)}
        if replaced:
            warn_user(
                f"NativeConfig.scaling replaces the scaling that this model was trained with ({replaced.pop()}), so "
                "that texts within its length are read differently, too. Its factor and original_max_positions refer "
                "to the rotation without any scaling."
            )
    return resolved


def _refuse_scaled_softmax(stacks: list[Stack], asked: list[RopeScaling]) -> None:
    """Refuses a scaling where an attention has computed a factor of its softmax from `rope_parameters` when it was
    built, as that of DeepSeek does from `mscale_all_dim`.
    """
    for stack in stacks:
        own = (getattr(stack.config, "rope_parameters", None) or {}).get("mscale_all_dim")
        if not own and not any(getattr(scaling, "mscale_all_dim", None) for scaling in asked):
            continue
        for attention in stack.attentions:
            if hasattr(sys.modules[type(attention.module).__module__], "yarn_get_mscale"):
                raise UnsupportedError(
                    f"{type(attention.module).__name__} takes a factor of its softmax from `mscale_all_dim` when it is "
                    "built, which NativeConfig.scaling would not change. Load the model with the scaling instead: "
                    "from_pretrained(..., rope_parameters={...})."
                )


def with_native_options(
    config: SchemeConfig, stacks: list[Stack], native_scheme: Callable[[], SchemeConfig]
) -> SchemeConfig:
    """`config` with the native options of a model that has the same scheme.

    Without options, "mrope" in a model with M-RoPE is what the model was trained with. The base and the assignment of
    pairs to axes are taken over together or not at all. Other schemes are returned unchanged.

    Args:
        config: the scheme that the caller asks for.
        stacks: the stacks that get it.
        native_scheme: determines the native scheme of these stacks.
    """
    if not isinstance(config, MRopeConfig) or AXES not in {
        number_of_axes(one.module, None) for stack in stacks for one in stack.rotaries
    }:
        return config
    try:
        native = native_scheme()
    except UnsupportedError:
        return config  # A scaled M-RoPE has no name here. The warning about its base remains.
    if not isinstance(native, MRopeConfig):
        return config
    groups = [_SPECTRUM] if config.by_head else [_SPECTRUM, _ASSIGNMENT]
    taken = [name for group in groups if not any(config.gave(name) for name in group) for name in group]
    return dataclasses.replace(config, **{name: getattr(native, name) for name in taken})


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


def warn_if_theta_changes(config: SchemeConfig, stacks: list[Stack]) -> None:
    """Warns if the default base of a rotation, which was not given, differs from the model's own base."""
    own = set().union(*(_thetas(getattr(stack.config, "rope_parameters", None)) for stack in stacks))
    changed = {
        (found.name, found.theta)  # type: ignore[attr-defined]
        for found in walk(config)
        if getattr(found, "theta", None) is not None and not found.gave("theta")
    }
    for name, theta in sorted(changed):
        if not own or theta in own:
            continue
        known = " and ".join(f"{value:g}" for value in sorted(own))
        warn_user(
            f"Scheme {name!r} rotates with theta={theta:g}, its default, but this model was built with {known}. For a "
            f"trained model, pass theta={max(own):g} to keep its base (swap_scheme does so), or theta={theta:g} if the "
            "change is intended."
        )


def _thetas(parameters: Any) -> set[float]:
    """The bases in a config's `rope_parameters`; some models have one for each layer type."""
    if not isinstance(parameters, dict):
        return set()
    own = {float(parameters["rope_theta"])} if parameters.get("rope_theta") is not None else set()
    return own.union(*(_thetas(value) for value in parameters.values()))


def warn_if_invisible(config: SchemeConfig, stacks: list[Stack]) -> None:
    """Warns if a scheme adds the same number to every component, in a model whose norms remove it."""
    configs = [config]
    if isinstance(config, LayeredConfig):
        attentions = [attention for stack in stacks for attention in stack.attentions]
        configs = [config.for_layer(attention.layer, attention.layer_type) for attention in attentions]
    if not any(getattr(one, "invisible_under_layer_norm", False) for one in configs):
        return
    if any(isinstance(module, nn.LayerNorm) for stack in stacks for module in stack.module.modules()):
        warn_user(
            f"Scheme {config.name!r} adds the same number to every component of a vector, but this model's LayerNorm "
            "subtracts the mean over components, so the positions have no effect, as with 'none'. Pass "
            "direction='random', 'one_hot' or 'learned' to give them an effect."
        )


def warn_of_invented_grid(config: SchemeConfig, stacks: list[Stack]) -> None:
    """Warns if a scheme for rows and columns is placed where tokens have none, and no grid was stated."""
    if any(stack.layout.has_axes or any(reads_axes(one.module) for one in stack.rotaries) for stack in stacks):
        return
    own = [one for one in walk(config) if one.name not in _DIAGONAL and _reads_axes(one) and not one.gave("grid")]
    if own:
        warn_user(
            f"Scheme {scheme_label(own[0])!r} reads rows and columns, but the tokens of the {stacks[0].part} part have "
            "one axis. rope_nd and swin read them as a grid that is filled row by row: state its `grid`. Schemes with "
            "`axes` raise an error unless a call passes position_ids of several axes."
        )


#: Schemes that read a token without coordinates at the same place on every axis.
_DIAGONAL = frozenset(("mrope",))


def _reads_axes(config: SchemeConfig) -> bool:
    axes = getattr(config, "axes", 1)
    return getattr(config, "grid", None) is not None or (isinstance(axes, int) and axes > 1)
