"""Different schemes in different layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.schemes.none import NoneConfig
from hf_posenc.schemes.registry import as_scheme, register_scheme
from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.scheme import SchemeConfig, option
from hf_posenc.schemes.validation import MOST_LAYERS, shown


@dataclass(frozen=True)
class LayeredConfig(SchemeConfig):
    """Base class of configs that give each layer its own scheme.

    An additive scheme acts once, before the first layer, so it has to be the same in all layers.
    """

    combinator: ClassVar[bool] = True
    without_parts: ClassVar[str] = (
        "has no parts itself; it defines the scheme of each layer. Build the scheme of each layer instead "
        "(`for_layer`)."
    )


def check_not_layered(owner: str, config: object) -> None:
    """Requires the config of a scheme for a single layer.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(config, SchemeConfig) or isinstance(config, LayeredConfig):
        raise ValueError(f"{owner} must be the config of a scheme for one layer, got {shown(config)}.")


def nested_scheme(config: SchemeConfig, option: str) -> None:
    """Converts an option, in any form in which a scheme can be passed, to the config of a scheme for one layer.

    Raises:
        UnknownNameError: for an unknown scheme or an unknown option of it.
        ValueError: for any other value, and for a scheme that differs between layers.
    """
    owner = f"{type(config).__name__}.{option}"
    object.__setattr__(config, option, as_scheme(getattr(config, option), owner))
    check_not_layered(owner, getattr(config, option))


@register_scheme
class ScheduleConfig(LayeredConfig):
    """One scheme per layer, as in models that alternate RoPE with no positions (arXiv:2501.18795).

    Args:
        layers: the scheme of layer 0, 1, ... of every stack: configs, names or dictionaries, or lists of these to
            combine.

    Raises:
        ValueError: if there are no layers or more than 4096, or an entry is not a scheme, or is a schedule itself.
    """

    name: ClassVar[str] = "schedule"

    layers: tuple[SchemeConfig, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple | list) or not 0 < len(self.layers) <= MOST_LAYERS:
            raise ValueError(
                f"ScheduleConfig.layers is {shown(self.layers)}; a schedule needs at least one layer, for example "
                f"(RopeConfig(), NoneConfig()), and has at most {MOST_LAYERS}."
            )
        configs = tuple(as_scheme(layer, "An entry of ScheduleConfig.layers") for layer in self.layers)
        object.__setattr__(self, "layers", configs)
        for index, config in enumerate(self.layers):
            check_not_layered(f"Layer {index} of a schedule", config)

    def for_layer(self, layer: int, layer_type: str | None = None) -> SchemeConfig:
        """The scheme of one layer.

        Raises:
            ValueError: if the schedule ends before it.
        """
        if layer >= len(self.layers):
            raise ValueError(
                f"The schedule has schemes for {len(self.layers)} layers, the last of which is layer "
                f"{len(self.layers) - 1}, but the model also has layer {layer}. Give one scheme for each layer."
            )
        return self.layers[layer]


@register_scheme
class InterleavedConfig(LayeredConfig):
    """Another scheme in every n-th layer: the RNoPE pattern (arXiv:2501.18795), as in SmolLM3 and Llama 4.

    Layers `every - 1`, `2 * every - 1`, ... get `other`, and all other layers get `inner`. The defaults are the
    published preset: RoPE, with no positions in every fourth layer.

    Args:
        inner: scheme of most layers.
        other: scheme of every n-th layer.
        every: the interval `n`.
    """

    name: ClassVar[str] = "interleaved"

    inner: SchemeConfig = option(RopeConfig, nested_scheme)
    other: SchemeConfig = option(NoneConfig, nested_scheme)
    every: int = option(4, minimum=2, maximum=MOST_LAYERS)

    def for_layer(self, layer: int, layer_type: str | None = None) -> SchemeConfig:
        """`other` for every n-th layer, else `inner`."""
        return self.other if (layer + 1) % self.every == 0 else self.inner


@register_scheme
class LocalGlobalConfig(LayeredConfig):
    """One scheme in layers with a sliding window and another in layers with full attention (RNoPE-SWA).

    Local RoPE with no positions in global layers is used in arXiv:2501.18795 (section 4) and Cohere 2; local and global
    RoPE with different bases in Gemma 3. The model's `config.layer_types` determines which layers are local.

    Args:
        local: scheme of the layers with a window.
        global_: scheme of the layers without a window.
    """

    name: ClassVar[str] = "local_global"

    local: SchemeConfig = option(RopeConfig, nested_scheme)
    global_: SchemeConfig = option(NoneConfig, nested_scheme)

    def for_layer(self, layer: int, layer_type: str | None = None) -> SchemeConfig:
        """The scheme for the layer's type.

        Raises:
            ValueError: if the model has no layer types.
        """
        if layer_type is None:
            raise ValueError(
                f"LocalGlobalConfig needs config.layer_types, but this model has none for layer {layer}: its layers do "
                "not alternate between a sliding window and full attention. Use InterleavedConfig or ScheduleConfig."
            )
        return self.global_ if layer_type == "full_attention" else self.local
