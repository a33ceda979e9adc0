"""Parts of a scheme in one of several processes that share the heads of each layer.

A part is run as it is, with its parameters whole. What it returns for all heads is cut to those of this process. Where
it reads queries or keys and has numbers of its own for each head, it is given those of this process in the place of
the missing ones, which are computed and dropped; one that treats all heads alike is given the heads of this process
only.

Whatever enters from outside the layer (parameters, hidden states) receives the sum of the gradients of all processes,
because each of them has those of its own heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from hf_posenc.schemes.parts import (
    DistanceBias,
    LogitBias,
    LogitScale,
    PairwiseBias,
    Part,
    QueryKeyMap,
    SeparableBias,
    take_declarations,
)
from hf_posenc.schemes.positions import AttentionPairs, Positions

PartType = TypeVar("PartType", bound=Part)


@dataclass(frozen=True)
class HeadShard:
    """The heads of one process among those that share a layer, in the order of their ranks.

    Args:
        mesh: the processes, a `DeviceMesh` of one dimension.
        shared_keys: whether every process has all key heads.
    """

    mesh: Any
    shared_keys: bool = False

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(self.mesh.size())

    def own(self, tensor: Tensor, axis: int) -> Tensor:
        """The heads of this process, from those of all."""
        count = tensor.shape[axis] // self.size
        return tensor.narrow(axis, count * self.mesh.get_local_rank(), count)

    def in_place(self, tensor: Tensor) -> Tensor:
        """`(batch, heads, ...)` of all heads, with those of this process in their place and copies in the others."""
        return tensor.repeat(1, self.size, *(1 for _ in tensor.shape[2:]))

    def entering(self, tensor: Tensor) -> Tensor:
        """The same tensor, whose gradient becomes the sum of those of all processes."""
        if not torch.is_grad_enabled() or not tensor.requires_grad:
            return tensor
        return cast("Tensor", _SummedGradient.apply(tensor, self.mesh.get_group()))


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class _SplitPart(Part, Generic[PartType]):
    """What parts of some heads have in common.

    Args:
        inner: the part of all heads.
        shard: which heads.
    """

    def __init__(self, inner: PartType, shard: HeadShard) -> None:
        super().__init__()
        self.inner = inner
        self.shard = shard
        take_declarations(self, inner)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses where the part does."""
        self.inner.check_cache(cached_length, total_length)

    @contextlib.contextmanager
    def summed_gradients(self) -> Iterator[None]:
        """Inside, the parameters of the part receive the sum of the gradients of all processes."""
        exchanged: list[tuple[dict[str, Any], str, Any]] = []
        try:
            if torch.is_grad_enabled():
                for module in self.inner.modules():
                    own = cast("dict[str, Any]", module._parameters)
                    for name, parameter in own.items():
                        if parameter is not None and parameter.requires_grad:
                            exchanged.append((own, name, parameter))
                            own[name] = self.shard.entering(parameter)
            yield
        finally:
            for own, name, parameter in exchanged:
                own[name] = parameter


class SplitDistanceBias(_SplitPart[DistanceBias], DistanceBias):
    """A bias of distance for some heads."""

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads of this process, *distance.shape)` in float32."""
        with self.summed_gradients():
            return self.shard.own(self.inner(distance), 0)

    def slopes_behind(self, device: torch.device) -> Tensor | None:
        """`(heads of this process,)` float32, or `None`, as the bias has them."""
        with self.summed_gradients():
            slopes = self.inner.slopes_behind(device)
        return None if slopes is None else self.shard.own(slopes, 0)


class SplitPairwiseBias(_SplitPart[PairwiseBias], PairwiseBias):
    """A bias of pairs for some heads."""

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """`(batch, heads of this process, length, num_features)` float32."""
        with self.summed_gradients():
            return self.shard.own(self.inner.key_features(self.shard.entering(hidden_states)), 1)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads of this process, query_len, key_len)` in float32."""
        with self.summed_gradients():
            bias: Tensor = self.inner(self._given(pairs))
        return self.shard.own(bias, 1) if self.whole_heads else bias

    def _given(self, pairs: AttentionPairs) -> AttentionPairs:
        """What the part is given."""
        if pairs.hidden_states is not None:
            pairs = dataclasses.replace(pairs, hidden_states=self.shard.entering(pairs.hidden_states))
        if not self.whole_heads:
            return pairs
        if pairs.key_features is not None:
            pairs = dataclasses.replace(pairs, key_features=self.shard.in_place(pairs.key_features))
        if not self.reads_heads:
            return pairs
        key = pairs.key if self.shard.shared_keys else self.shard.in_place(pairs.key)
        return dataclasses.replace(pairs, query=self.shard.in_place(pairs.query), key=key)


class SplitSeparableBias(SplitPairwiseBias, SeparableBias):
    """A bias that is a number per key minus one per query, for some heads."""

    def key_terms(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads of this process, key_len)` in float32."""
        with self.summed_gradients():
            terms = cast("SeparableBias", self.inner).key_terms(self._given(pairs))
        return self.shard.own(terms, 1) if self.whole_heads else terms


class SplitScale(_SplitPart[LogitScale], LogitScale):
    """A scale of the logits of some heads."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, heads of this process or 1, length)` in float32."""
        with self.summed_gradients():
            scale: Tensor = self.inner(positions)
        return scale if scale.shape[1] == 1 else self.shard.own(scale, 1)


class SplitQueryKeyMap(_SplitPart[QueryKeyMap], QueryKeyMap):
    """A map of some heads."""

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the phases of the map, of all heads."""
        with self.summed_gradients():
            return self.inner.phases(positions)

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """As the map has them."""
        with self.summed_gradients():
            return self.inner.prepared(phases, dtype)

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, heads of this process, length, head_dim)`, as the map has it."""
        with self.summed_gradients():
            if not self.whole_heads:
                return self.inner.map_query(query, phases)
            return self.shard.own(self.inner.map_query(self.shard.in_place(query), phases), 1)

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, key_value_heads of this process, length, head_dim)`, as the map has it."""
        with self.summed_gradients():
            if not self.whole_heads or self.shard.shared_keys:
                return self.inner.map_key(key, phases)
            return self.shard.own(self.inner.map_key(self.shard.in_place(key), phases), 1)


def split_part(part: Part, shard: HeadShard) -> Part:
    """A part of a scheme for the heads of one process."""
    if isinstance(part, QueryKeyMap):
        # Without parameters there is nothing to sum, and what treats all heads alike runs as it is.
        if not part.whole_heads and next(part.parameters(), None) is None:
            return part
        return SplitQueryKeyMap(part, shard)
    if isinstance(part, DistanceBias):
        return SplitDistanceBias(part, shard)
    if isinstance(part, SeparableBias):
        return SplitSeparableBias(part, shard)
    if isinstance(part, LogitBias):
        return SplitPairwiseBias(cast("PairwiseBias", part), shard)
    return SplitScale(cast("LogitScale", part), shard)
