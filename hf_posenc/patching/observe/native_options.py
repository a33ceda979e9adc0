"""Options that a scheme takes from the model's native scheme if the caller has not given them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.rotary_axes import AXES, number_of_axes
from hf_posenc.patching.find.sites import FoundModule, Stack
from hf_posenc.schemes import MRopeConfig
from hf_posenc.schemes.config import SchemeConfig

_SPECTRUM = ("theta", "inverse_frequencies", "rotary_dim", "layout")
_ASSIGNMENT = ("sections", "interleaved", "axes")


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
        number_of_axes(one.module, None) for one in _rotaries(stacks)
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


def _rotaries(stacks: list[Stack]) -> list[FoundModule]:
    return [rotary for stack in stacks for rotary in stack.rotaries]
