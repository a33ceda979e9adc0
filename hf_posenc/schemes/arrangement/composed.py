"""Several schemes at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.config import OuterConfig, SchemeConfig
from hf_posenc.schemes.none import NoneConfig
from hf_posenc.schemes.outer_parts import CombinedScale, SummedEncoding, sum_of_biases
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.registry import as_scheme, register_scheme
from hf_posenc.schemes.validation import MOST_PARTS, shown


@register_scheme
class ComposedConfig(OuterConfig):
    """Several schemes at once: additive encodings and biases are added, scales multiplied; at most one maps q and k.

    Biases that read queries or keys (`shaw`, `cope`, `grape`, ...) read those from which the logits are computed. In
    combination with a rotation, these are rotated; rotations by the layer's input (`repo`, `grape_m`, `selective_rope`)
    come after them.

    Args:
        parts: other schemes, for example `(SinusoidalConfig(), AlibiConfig())`; names and dictionaries become configs.
    """

    name: ClassVar[str] = "composed"
    combinator: ClassVar[bool] = True
    merges_children: ClassVar[bool] = True

    parts: tuple[SchemeConfig, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple | list) or not 0 < len(self.parts) <= MOST_PARTS:
            raise ValueError(
                f"ComposedConfig.parts is {shown(self.parts)}; expected a non-empty sequence of at most {MOST_PARTS} "
                "scheme configs, for example (SinusoidalConfig(), AlibiConfig())."
            )
        parts = tuple(as_scheme(part, "An entry of ComposedConfig.parts") for part in self.parts)
        for index, part in enumerate(parts):
            if isinstance(part, ComposedConfig):
                raise ValueError(
                    "ComposedConfig.parts contains another ComposedConfig; list its parts directly instead."
                )
            if isinstance(part, LayeredConfig):
                raise ValueError(_compose_inside(part, parts[:index] + parts[index + 1 :]))
        object.__setattr__(self, "parts", parts)

    def with_children(self, children: Mapping[str, SchemeConfig]) -> Self:
        """A copy of this config in which some children are replaced; a nested composition is flattened."""
        parts = [part for child in (self.children() | dict(children)).values() for part in child.acting_together()]
        return self if tuple(parts) == self.parts else dataclasses.replace(self, parts=tuple(parts))

    def acting_together(self) -> tuple[SchemeConfig, ...]:
        """Returns the composed schemes."""
        return self.parts

    def merge(self, built: Sequence[SchemeParts]) -> SchemeParts:
        """Combines the parts of the schemes, given in order.

        Raises:
            ValueError: if more than one scheme maps queries and keys, or replaces their logits.
        """
        maps = [parts.query_key_map for parts in built if parts.query_key_map is not None]

        def named(rule: Callable[[SchemeParts], bool]) -> list[str]:
            return [config.name for config, parts in zip(self.parts, built, strict=True) if rule(parts)]

        if len(maps) > 1:
            rotating = named(lambda parts: parts.query_key_map is not None)
            raise ValueError(
                f"ComposedConfig.parts contains {len(maps)} schemes that map queries and keys ({', '.join(rotating)}), "
                "but a layer maps them once. Keep only one of these schemes."
            )
        # The sum of two changes of the logits is not both changes.
        correcting = named(lambda parts: getattr(parts.logit_bias, "replaces_logits", False))
        if len(correcting) > 1:
            raise ValueError(
                f"ComposedConfig.parts contains {' and '.join(correcting)}, which both replace the logits that queries "
                "and keys give. Keep only one of them, or give them to different layers."
            )
        reading = named(lambda parts: getattr(parts.logit_bias, "reads_heads", False))
        if maps and maps[0].width_factor != 1 and reading:
            raise ValueError(
                f"ComposedConfig.parts contains {reading[0]!r}, which reads queries or keys of the original width, and "
                "a map that changes this width; keep only one of them."
            )

        def combined(kind: Callable[[list[Any]], Any], name: str) -> Any:
            parts = [part for scheme_parts in built if (part := getattr(scheme_parts, name)) is not None]
            return kind(parts) if len(parts) > 1 else next(iter(parts), None)

        return SchemeParts(
            additive=combined(SummedEncoding, "additive"),
            query_key_map=maps[0] if maps else None,
            logit_bias=combined(sum_of_biases, "logit_bias"),
            logit_scale=combined(CombinedScale, "logit_scale"),
        )


def _compose_inside(layered: LayeredConfig, others: tuple[SchemeConfig, ...]) -> str:
    """The error message for a layered config in a composition, with an equivalent config as a suggestion."""
    owner = type(layered).__name__
    inner = next((place for place in layered.children() if "[" not in place), None)
    # A schedule has a list of layers instead of such an option.
    scheme = NoneConfig() if inner is None else getattr(layered, inner)
    names = [type(part).__name__ + "()" for part in (scheme, *others) if not isinstance(part, NoneConfig)]
    example = names[0] if len(names) == 1 else f"ComposedConfig(({', '.join(names)}))"
    example = f"{owner}({inner}={example})" if inner else f"{owner}(layers=({example}, ...))"
    return (
        f"ComposedConfig.parts contains {layered.name!r}, which defines the scheme of each layer, but a composition is "
        f"the scheme of a single layer. Compose inside its layers instead, for example {example}, and likewise in its "
        "other layers if needed."
    )
