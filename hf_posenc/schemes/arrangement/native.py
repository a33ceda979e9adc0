"""A place in a config for whatever the model has natively."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posenc.schemes.arrangement.composed import ComposedConfig
from hf_posenc.schemes.arrangement.schedule import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig
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
    return isinstance(config, NativeConfig) or any(names_native(inner) for inner in _nested(config))


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


def _nested(config: SchemeConfig) -> list[SchemeConfig]:
    values = [getattr(config, field.name) for field in dataclasses.fields(config)]
    items = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return [item for item in items if isinstance(item, SchemeConfig)]


def _parts(config: SchemeConfig) -> tuple[SchemeConfig, ...]:
    return config.parts if isinstance(config, ComposedConfig) else (config,)


def _replaced(config: SchemeConfig, native: SchemeConfig) -> SchemeConfig:
    if isinstance(config, NativeConfig):
        return native
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, SchemeConfig):
            changed[field.name] = _replaced(value, native)
        elif isinstance(value, tuple) and any(isinstance(item, SchemeConfig) for item in value):
            replaced = [_replaced(item, native) if isinstance(item, SchemeConfig) else item for item in value]
            if isinstance(config, ComposedConfig):
                replaced = [part for item in replaced for part in _parts(item)]
            changed[field.name] = tuple(replaced)
    return dataclasses.replace(config, **changed) if changed else config
