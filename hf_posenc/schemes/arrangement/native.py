"""A placeholder for the native scheme of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from hf_posenc.schemes.arrangement.schedule import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.config import names_native, walk
from hf_posenc.schemes.rotary.rope import STATED_BY_FREQUENCIES
from hf_posenc.schemes.rotary.scaling import RopeScaling, check_scaling
from hf_posenc.schemes.scheme import SchemeConfig, option, register_scheme

#: Types of layers that see a limited number of tokens, however long the text is.
_WINDOWED = ("sliding_attention", "chunked_attention")
ONLY_WINDOWS_ROTATE = (
    "In this model only layers with a sliding window rotate. Distances in a window do not grow with the text, so their "
    "rotation needs no change."
)


@register_scheme
class NativeConfig(SchemeConfig):
    """The native scheme of the stock model, wherever a scheme can be used: `inner="native"`, `["native", "ssmax"]`.

    `patch_model` replaces it by `native_scheme(model)`, so `model.position_encoding.config` and checkpoints contain the
    scheme itself.

    Args:
        scaling: extends the context of a stock model with RoPE, in place of the scaling that it has:
            `NativeConfig(scaling=YarnScaling(factor=4.0, original_max_positions=8192))`, or on the command line
            `native:scaling={"type":"yarn","factor":4.0,"original_max_positions":8192}`. All other options, such as
            `theta`, are those of the stock model. Layers with a sliding or chunked window keep what they have, because
            distances in a window do not grow with the text; a config that gives each layer its own scheme is taken
            literally. `None` changes nothing.

    Raises:
        UnknownNameError: for an unknown type of scaling.
        ValueError: for a value that is not a scaling; in `patch_model` for a scaling of a model without RoPE, or whose
            rotation cannot have it.
    """

    name: ClassVar[str] = "native"
    combinator: ClassVar[bool] = True
    stands_for_native: ClassVar[bool] = True
    without_parts: ClassVar[str] = (
        "stands for the native scheme of a model, which only patch_model(model, ...) can determine. Name the scheme, "
        "or pass native_scheme(model)."
    )

    scaling: RopeScaling | None = option(None, check_scaling)


def asked_scalings(config: SchemeConfig) -> list[RopeScaling]:
    """The scalings that a config asks for in native schemes."""
    scalings = [nested.scaling for nested in walk(config) if isinstance(nested, NativeConfig)]
    return [scaling for scaling in scalings if scaling is not None]


def with_native(config: SchemeConfig, native: SchemeConfig, layer_types: Sequence[str | None]) -> SchemeConfig:
    """The config in which `native` replaces every `NativeConfig`.

    Args:
        config: the requested config.
        native: the native scheme of the model. If it differs between layers, the result is a schedule.
        layer_types: the type of every layer of the model, or `None` if unknown.

    Raises:
        ValueError: for a scaling of a native scheme that cannot have it.
    """
    if not names_native(config):
        return config
    scaled = bool(asked_scalings(config))
    if not isinstance(native, LayeredConfig) and not scaled:
        return _replaced(config, native)
    if config == NativeConfig():
        return native
    per_layer = isinstance(config, LayeredConfig)
    natives = _by_layer(native, layer_types)
    # A request for each layer is taken literally.
    far = set(range(len(natives)))
    if scaled and not per_layer:
        far = far_layers(native, layer_types)
        if any(map(_rotations, natives)) and not far:
            raise ValueError(
                f"NativeConfig.scaling: {ONLY_WINDOWS_ROTATE} For longer texts, extend_context(model, length=...) is "
                "enough. To scale it, patch with 'rope' and its theta."
            )
        far = far or {0}
    schemes = [config.for_layer(layer, kind) for layer, kind in enumerate(layer_types)]
    layers = tuple(_replaced(scheme, natives[layer], layer in far) for layer, scheme in enumerate(schemes))
    uniform = not isinstance(native, LayeredConfig) and not per_layer and len(set(layers)) == 1
    return layers[0] if uniform else ScheduleConfig(layers=layers)


def _replaced(config: SchemeConfig, native: SchemeConfig, scaled: bool = True) -> SchemeConfig:
    if isinstance(config, NativeConfig):
        return native if config.scaling is None or not scaled else _with_scaling(native, config.scaling)
    children = config.children().items()
    return config.with_children({place: _replaced(child, native, scaled) for place, child in children})


def _with_scaling(native: SchemeConfig, scaling: RopeScaling) -> SchemeConfig:
    if not _rotations(native):
        raise ValueError(
            f"NativeConfig.scaling is for RoPE, and the native scheme is {native.name!r}, which rotates nothing. A "
            "longer table (swap_scheme with table_extension), or another scheme, can read longer texts."
        )
    if native.children():
        children = native.children().items()
        rotating = {place: _with_scaling(child, scaling) for place, child in children if _rotations(child)}
        return native.with_children(native.children() | rotating)
    if "scaling" not in {field.name for field in dataclasses.fields(native)}:
        raise ValueError(
            f"NativeConfig.scaling: the native scheme is the rotation {native.name!r}, which has no scaling in this "
            "library. Its option `theta` can slow it down."
        )
    if getattr(native, "inverse_frequencies", None) is not None:
        raise ValueError(f"NativeConfig.scaling: the native RoPE {STATED_BY_FREQUENCIES}")
    return dataclasses.replace(native, scaling=scaling)  # type: ignore[call-arg]


def far_layers(native: SchemeConfig, layer_types: Sequence[str | None]) -> set[int]:
    """The layers whose rotations meet longer distances in longer texts. The arguments are those of `with_native`."""
    natives = _by_layer(native, layer_types)
    return {at for at, kind in enumerate(layer_types) if kind not in _WINDOWED and _rotations(natives[at])}


def _by_layer(native: SchemeConfig, layer_types: Sequence[str | None]) -> list[SchemeConfig]:
    return [native.for_layer(*place) for place in enumerate(layer_types)]


def _rotations(config: SchemeConfig) -> list[SchemeConfig]:
    return [nested for nested in walk(config) if hasattr(nested, "theta") and not nested.children()]
