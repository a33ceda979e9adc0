"""A placeholder for the native scheme of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.schemes.arrangement.schedule import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig, walk
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.rotary.scaling import RopeScaling, check_scaling

#: Types of layers that see a limited number of tokens, however long the text is.
_WINDOWED = ("sliding_attention", "chunked_attention")


@register_scheme
@dataclass(frozen=True)
class NativeConfig(SchemeConfig):
    """The native scheme of the stock model, wherever a scheme can be used: `inner="native"`, `["native", "ssmax"]`.

    `patch_model` replaces it by `native_scheme(model)`, so `model.position_encoding.config` and checkpoints contain the
    scheme itself.

    Args:
        scaling: extends the context of a model with RoPE, in place of the scaling that it has:
            `NativeConfig(scaling=YarnScaling(factor=4.0, original_max_positions=8192))`, or on the command line
            `native:scaling={"type":"yarn","factor":4.0,"original_max_positions":8192}`. All other options, such as
            `theta`, are those of the model. If its layers have different rotations, those with a sliding window keep
            theirs. `None` changes nothing.

    Raises:
        UnknownNameError: for an unknown type of scaling.
        ValueError: for a value that is no scaling; in `patch_model` for a scaling of a model without RoPE.
    """

    name: ClassVar[str] = "native"
    combinator: ClassVar[bool] = True

    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_scaling(self)

    def build(self, context: BuildContext) -> SchemeParts:
        """Always raises an error, because the native scheme is unknown without a model.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "The scheme 'native' stands for the native scheme of a model, which only patch_model(model, ...) can "
            "determine. Name the scheme, or pass native_scheme(model)."
        )


def names_native(config: SchemeConfig) -> bool:
    """Whether a config, or any config inside it, is `NativeConfig`."""
    return any(isinstance(found, NativeConfig) for found in walk(config))


def with_native(config: SchemeConfig, native: SchemeConfig, layer_types: Sequence[str | None]) -> SchemeConfig:
    """The config with `native` in place of every `NativeConfig`.

    Args:
        config: the requested config.
        native: the native scheme of the model. If it differs between layers, the result is a schedule.
        layer_types: the type of every layer of the model, or `None` if unknown.

    Raises:
        ValueError: for a scaling of a native scheme that does not have one.
    """
    if not names_native(config) or config == NativeConfig():
        return native if config == NativeConfig() else config
    if not isinstance(native, LayeredConfig):
        _check_scalable(config, [native])
        return _replaced(config, native, scaled=True)
    layers = [native.for_layer(layer, kind) for layer, kind in enumerate(layer_types)]
    _check_scalable(config, layers)
    far = {kind for layer, kind in zip(layers, layer_types, strict=True) if _scalable(layer)} - {*_WINDOWED}
    asked = config if isinstance(config, LayeredConfig) else None
    return ScheduleConfig(
        layers=tuple(
            _replaced(
                config if asked is None else asked.for_layer(layer, kind),
                layers[layer],
                scaled=_scalable(layers[layer]) and (kind in far or not far),
            )
            for layer, kind in enumerate(layer_types)
        )
    )


def _replaced(config: SchemeConfig, native: SchemeConfig, scaled: bool) -> SchemeConfig:
    if isinstance(config, NativeConfig):
        return native if config.scaling is None or not scaled else _with_scaling(native, config.scaling)
    children = config.children().items()
    return config.with_children({place: _replaced(child, native, scaled) for place, child in children})


def _with_scaling(native: SchemeConfig, scaling: RopeScaling) -> SchemeConfig:
    if _takes_scaling(native):
        return dataclasses.replace(native, scaling=scaling)  # type: ignore[call-arg]
    return native.with_children({place: _with_scaling(child, scaling) for place, child in native.children().items()})


def _check_scalable(config: SchemeConfig, natives: Sequence[SchemeConfig]) -> None:
    asked = [found for found in walk(config) if isinstance(found, NativeConfig) and found.scaling is not None]
    if asked and not any(map(_scalable, natives)):
        raise ValueError(
            f"NativeConfig.scaling is for RoPE, and the native scheme of this model is {natives[0].name!r}, which has "
            "no scaling. A longer table (swap_scheme with table_extension), or another scheme, can read longer texts."
        )


def _scalable(config: SchemeConfig) -> bool:
    return any(map(_takes_scaling, walk(config)))


def _takes_scaling(config: SchemeConfig) -> bool:
    return "scaling" in {field.name for field in dataclasses.fields(config)}
