"""A scheme in the attention from one sequence to another."""

from __future__ import annotations

from typing import ClassVar, Literal

from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.arrangement.schedule import LayeredConfig, nested_scheme
from hf_posenc.schemes.config import SchemeConfig, names_native
from hf_posenc.schemes.none import NoneConfig
from hf_posenc.schemes.registry import SchemeLike, as_scheme, register_scheme
from hf_posenc.schemes.scheme import option


def _scheme_of_one_sequence(config: SchemeConfig, option: str) -> None:
    """Converts an option to the scheme of all layers within a sequence."""
    owner = f"{type(config).__name__}.{option}"
    scheme = as_scheme(getattr(config, option), owner)
    if isinstance(scheme, PartsConfig | CrossAttentionConfig):
        raise ValueError(f"{owner} must be the scheme of the attention within a sequence, got {scheme.name!r}.")
    object.__setattr__(config, option, scheme)


@register_scheme
class CrossAttentionConfig(LayeredConfig):
    """A scheme in self-attention, and another one in the cross-attention of a decoder.

    `patch_model(model, scheme, cross_attention=...)` creates it. In cross-attention, queries have the positions of the
    decoder's tokens, and keys those of the encoder's, both counted from 0 without padding. Every query sees every key,
    so a bias is that of a bidirectional model.

    Args:
        inner: scheme of self-attention in encoder and decoder; may differ between layers.
        cross: scheme of cross-attention in every layer of the decoder: a rotation, a bias of distance, or both.

    Raises:
        ValueError: for an `inner` with schemes of parts, and a `cross` that differs between layers.
    """

    name: ClassVar[str] = "cross_attention"

    inner: SchemeConfig = option(NoneConfig, _scheme_of_one_sequence)
    cross: SchemeConfig = option(NoneConfig, nested_scheme)

    def for_layer(self, layer: int, layer_type: str | None = None) -> SchemeConfig:
        """The scheme of self-attention in a layer."""
        return self.inner.for_layer(layer, layer_type)

    def within_and_across(self) -> tuple[SchemeConfig, SchemeConfig | None]:
        """The scheme of self-attention, and that of cross-attention."""
        return self.inner, self.cross


def across(config: SchemeConfig, cross_attention: SchemeLike | Literal[True]) -> SchemeConfig:
    """The scheme `config` with another one in cross-attention, the same for `True`.

    Raises:
        ValueError: for `True` with the native scheme, or one that differs between layers or parts.
    """
    if cross_attention is not True:
        return CrossAttentionConfig(config, as_scheme(cross_attention, "cross_attention"))
    if isinstance(config, LayeredConfig | PartsConfig) or names_native(config):
        raise ValueError(
            f"cross_attention=True stands for the scheme itself, but cross-attention cannot use {config.name!r}. Name "
            "another scheme: cross_attention='alibi'."
        )
    return CrossAttentionConfig(config, config)
