"""Parts that consist of other parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from hf_posenc.schemes.features import feature_counts
from hf_posenc.schemes.parts import LogitBias, PairwiseBias, Part, declare_any
from hf_posenc.schemes.reach import shortest

PartType = TypeVar("PartType", bound=Part)


class OuterPart(Part, Generic[PartType]):
    """Base class of parts that consist of others."""

    def members(self) -> Sequence[Part]:
        """The parts that this one consists of."""
        raise NotImplementedError

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Calls `check_cache` of every member."""
        for part in self.members():
            part.check_cache(cached_length, total_length)

    def adopt(self, native: Tensor) -> bool:
        """Passes the native weight to the first member that accepts it."""
        return any(part.adopt(native) for part in self.members())


def declare_together(outer: Part, parts: Sequence[Part]) -> None:
    """Declares what the parts do together: any of their flags, the shortest reach, and the features of all."""
    declare_any(outer, parts)
    outer.length_reach = shortest(part.length_reach for part in parts)
    if isinstance(outer, PairwiseBias):
        counts = [feature_counts(part) for part in parts if isinstance(part, LogitBias)]
        outer.num_features = sum(own + shared for own, shared in counts)
        outer.num_shared_features = sum(shared for _, shared in counts)


def weighted_sum(terms: Iterable[tuple[Tensor, float]]) -> Tensor:
    """The sum of tensors, each times its weight; a weight of 1 costs nothing."""
    first, *others = (value if weight == 1 else value * weight for value, weight in terms)
    return sum(others, start=first)
