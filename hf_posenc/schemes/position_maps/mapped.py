"""Schemes with mapped positions."""

from __future__ import annotations

from dataclasses import dataclass

from hf_posenc.schemes.arrangement.schedule import nested_scheme
from hf_posenc.schemes.outer_parts import ChainedMap, CombinedScale, SummedEncoding, SummedPairwiseBias
from hf_posenc.schemes.parts import DistanceBias, PairwiseBias, Part, PositionMap, SchemeParts
from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.scheme import BuildContext, OuterConfig, SchemeConfig, option


def map_parts(position_map: PositionMap, parts: SchemeParts, option: str, scheme: SchemeConfig) -> SchemeParts:
    """Applies a position map to the parts of a scheme.

    Args:
        position_map: maps the positions.
        parts: the parts of the scheme, at least one.
        option: the option that holds the scheme, for error messages.
        scheme: the scheme.

    Raises:
        ValueError: if the scheme depends only on the order of tokens, so that the map has no effect; or if it needs
            integer positions and the map may produce real ones.
    """
    if not any(part.reads_positions for part in parts):
        raise ValueError(
            f"{option} is {scheme.name!r}, which depends on the order of tokens and not on their positions, so mapping "
            f"positions has no effect. Use {scheme.name!r} itself, or compose it with this scheme."
        )
    modules = [module for part in parts for module in part.modules()]
    if any(isinstance(module, PairwiseBias) and module.needs_oldest_keys for module in modules):
        raise ValueError(
            f"{option} contains a scheme that combines neighbouring tokens of one document, and changed positions do "
            "not show where documents begin. Compose that scheme with this one instead of nesting it."
        )
    if position_map.gives_real_positions and any(needs_whole_positions(part) for part in parts):
        raise ValueError(
            f"{option} is {scheme.name!r}, which needs integer positions, but this map produces real ones. Use a map "
            "to integers (an integer factor, kind='integer'), or a scheme that accepts real positions, such as 'rope', "
            "'alibi' or 'sinusoidal'."
        )
    additive, query_key_map = parts.additive, parts.query_key_map
    bias, scale = parts.logit_bias, parts.logit_scale
    if bias is not None and not (position_map.keeps_distances and isinstance(bias, DistanceBias)):
        bias = SummedPairwiseBias({"inner": bias}, position_map)
    return SchemeParts(
        additive=None if additive is None else SummedEncoding({"inner": additive}, position_map),
        query_key_map=None if query_key_map is None else ChainedMap({"inner": query_key_map}, position_map),
        logit_bias=bias,
        logit_scale=None if scale is None else CombinedScale({"inner": scale}, position_map),
    )


def needs_whole_positions(part: Part) -> bool:
    """Whether a part, or any module in it, needs integer positions."""
    return any(module.whole_positions for module in part.modules() if isinstance(module, Part))


@dataclass(frozen=True)
class PositionMapConfig(OuterConfig):
    """Base class of configs that map the positions of a scheme.

    All parts of the scheme get the mapped positions, including a logit scale. To keep a part at the original positions,
    compose it with the map instead of nesting it in the map. Lengths still count tokens. Schemes that depend on the
    order of tokens instead of their positions, such as the gates of `forget_gate`, are not affected by a map, and are
    refused if there is nothing else to map.

    Args:
        inner: the scheme that gets the mapped positions: a config, a name, or the dictionary of a config.
    """

    inner: SchemeConfig = option(RopeConfig, nested_scheme)

    def position_map(self) -> PositionMap:
        """Returns a new map."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts of the scheme with mapped positions.

        Raises:
            ValueError: if the scheme has no parts, cannot be built here, or does not support the mapped positions.
        """
        parts = self.inner.build(context)
        if not list(parts):
            raise ValueError(
                f"{type(self).__name__}.inner is {self.inner.name!r}, which encodes no positions, so there is "
                f"nothing to map. Use {self.inner.name!r} itself."
            )
        return map_parts(self.position_map(), parts, f"{type(self).__name__}.inner", self.inner)
