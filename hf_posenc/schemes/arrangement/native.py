"""A place in a config for whatever the model has natively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.schemes.arrangement.schedule import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig, walk
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.registry import register_scheme


@register_scheme
@dataclass(frozen=True)
class NativeConfig(SchemeConfig):
    """The stock model's own scheme, wherever a scheme can stand: `inner="native"`, `["native", "ssmax"]`.

    `patch_model` puts `native_scheme(model)` in its place, so `model.position_encoding.config` and checkpoints name
    the scheme itself.
    """

    name: ClassVar[str] = "native"
    combinator: ClassVar[bool] = True

    def build(self, context: BuildContext) -> SchemeParts:
        """Always raises: without a model nobody knows what is native.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "The scheme 'native' stands for what a model has by itself and is known only to patch_model(model, ...). "
            "Name the scheme, or pass native_scheme(model)."
        )


def names_native(config: SchemeConfig) -> bool:
    """Whether a config, or any config inside it, is `NativeConfig`."""
    return any(isinstance(found, NativeConfig) for found in walk(config))


def with_native(config: SchemeConfig, native: SchemeConfig, layer_types: Sequence[str | None]) -> SchemeConfig:
    """The config with `native` in place of every `NativeConfig`.

    Args:
        config: what was asked for.
        native: the model's own scheme; where its layers differ, the result is a schedule.
        layer_types: of every layer of the model, `None` where it does not say.
    """
    if not names_native(config):
        return config
    if not isinstance(native, LayeredConfig):
        return _replaced(config, native)
    if isinstance(config, NativeConfig):
        return native
    asked = config if isinstance(config, LayeredConfig) else None
    return ScheduleConfig(
        layers=tuple(
            _replaced(config if asked is None else asked.for_layer(layer, kind), native.for_layer(layer, kind))
            for layer, kind in enumerate(layer_types)
        )
    )


def _replaced(config: SchemeConfig, native: SchemeConfig) -> SchemeConfig:
    if isinstance(config, NativeConfig):
        return native
    return config.with_children({place: _replaced(child, native) for place, child in config.children().items()})
