"""Several schemes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar, cast

from torch import Tensor, nn

from hf_posenc.schemes.base import (
    AdditiveEncoding,
    BuildContext,
    LogitBias,
    Part,
    Positions,
    SchemeConfig,
    SchemeParts,
)
from hf_posenc.schemes.registry import register_scheme

PartType = TypeVar("PartType", bound=Part)


class _PartSum(Part, Generic[PartType]):
    """What sums of parts have in common.

    Args:
        parts: the summands.
    """

    def __init__(self, parts: list[PartType]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.length_dependent = any(part.length_dependent for part in parts)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses where any summand does."""
        for part in self._summands():
            part.check_cache(cached_length, total_length)

    def adopt(self, native: Tensor) -> bool:
        """Hands the native weight to the first summand that takes it."""
        return any(part.adopt(native) for part in self._summands())

    def _summands(self) -> list[PartType]:
        return cast("list[PartType]", list(self.parts))


class SummedEncoding(_PartSum[AdditiveEncoding], AdditiveEncoding):
    """The sum of several additive encodings."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)`."""
        first, *others = (part(positions) for part in self._summands())
        return cast("Tensor", sum(others, start=first))


class SummedBias(_PartSum[LogitBias], LogitBias):
    """The sum of several logit biases."""

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        first, *others = (part(distance) for part in self._summands())
        return cast("Tensor", sum(others, start=first))


@register_scheme
@dataclass(frozen=True)
class ComposedConfig(SchemeConfig):
    """Several schemes at once: additive encodings sum, logit biases sum, and at most one rotates.

    Args:
        parts: configs of other schemes, for example `(SinusoidalConfig(), AlibiConfig())`.
    """

    name: ClassVar[str] = "composed"
    combinator: ClassVar[bool] = True

    parts: tuple[SchemeConfig, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple | list) or not self.parts:
            raise ValueError(
                f"ComposedConfig.parts is {self.parts!r}; expected a non-empty sequence of scheme configs, for example "
                "(SinusoidalConfig(), AlibiConfig())."
            )
        for part in self.parts:
            if not isinstance(part, SchemeConfig):
                raise ValueError(
                    f"ComposedConfig.parts holds {part!r}; expected scheme configs, for example AlibiConfig()."
                )
            if isinstance(part, ComposedConfig):
                raise ValueError("ComposedConfig.parts holds another ComposedConfig; list its parts directly instead.")
        object.__setattr__(self, "parts", tuple(self.parts))

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """Whether any of the schemes wants its own copy in every layer; then all biases and maps get one."""
        return any(part.per_layer for part in self.parts)

    @property
    def invisible_under_layer_norm(self) -> bool:
        """Whether a LayerNorm removes the contribution of any of the schemes."""
        return any(getattr(part, "invisible_under_layer_norm", False) for part in self.parts)

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds all schemes and merges their parts.

        Raises:
            ValueError: if more than one scheme maps queries and keys.
        """
        built = [part.build(context) for part in self.parts]
        additive = [parts.additive for parts in built if parts.additive is not None]
        biases = [parts.logit_bias for parts in built if parts.logit_bias is not None]
        maps = [parts.query_key_map for parts in built if parts.query_key_map is not None]
        if len(maps) > 1:
            rotating = [
                part.name for part, parts in zip(self.parts, built, strict=True) if parts.query_key_map is not None
            ]
            raise ValueError(
                f"ComposedConfig.parts holds {len(maps)} schemes that map queries and keys ({', '.join(rotating)}), "
                "whose order would matter; keep one of them."
            )
        return SchemeParts(
            additive=SummedEncoding(additive) if len(additive) > 1 else next(iter(additive), None),
            query_key_map=maps[0] if maps else None,
            logit_bias=SummedBias(biases) if len(biases) > 1 else next(iter(biases), None),
        )
