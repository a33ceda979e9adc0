"""Different schemes in different layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.schemes.base import BuildContext, SchemeConfig, SchemeParts
from hf_posenc.schemes.registry import register_scheme


@register_scheme
@dataclass(frozen=True)
class ScheduleConfig(SchemeConfig):
    """One scheme per layer, as in models that alternate RoPE with no positions (arXiv:2501.18795).

    Args:
        layers: the scheme of layer 0, 1, ... of every stack. An additive scheme acts once, before the first layer, so
            it has to be the same in all of them.

    Raises:
        ValueError: if there are no layers, or an entry is no scheme or a schedule itself.
    """

    name: ClassVar[str] = "schedule"
    combinator: ClassVar[bool] = True

    layers: tuple[SchemeConfig, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("A schedule needs at least one layer.")
        for index, config in enumerate(self.layers):
            if not isinstance(config, SchemeConfig) or isinstance(config, ScheduleConfig):
                raise ValueError(f"Layer {index} of a schedule has to be a scheme's config, got {config!r}.")

    def for_layer(self, layer: int) -> SchemeConfig:
        """The scheme of one layer.

        Raises:
            ValueError: if the schedule ends before it.
        """
        if layer >= len(self.layers):
            raise ValueError(f"The schedule names {len(self.layers)} layers, the model has a layer {layer}.")
        return self.layers[layer]

    def build(self, context: BuildContext) -> SchemeParts:
        """Always raises: a schedule is built layer by layer.

        Raises:
            ValueError: always.
        """
        raise ValueError("A schedule has no parts of its own: build the scheme of each layer (`for_layer`).")
