"""What a requested scheme takes from the model's native scheme."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.rotary_spectra import AXES, number_of_axes
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.schemes import MRopeConfig
from hf_posenc.schemes.arrangement.native import asked_scalings, names_native, with_native
from hf_posenc.schemes.config import SchemeConfig, walk
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
            warnings.warn(
                f"NativeConfig.scaling replaces the scaling that this model was trained with ({replaced.pop()}), so "
                "that texts within its length are read differently, too. Its factor and original_max_positions refer "
                "to the rotation without any scaling.",
                stacklevel=5,
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
