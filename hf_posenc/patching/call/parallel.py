"""Several processes or copies of a model: tensor parallelism, `nn.DataParallel`, `DistributedDataParallel`.

Under tensor parallelism, several processes share the heads of each layer. Every process holds a part with all of its
parameters, runs it for all heads and keeps the result for its own heads. A part that reads queries or keys and has
parameters for each head is given copies of the heads of this process in place of the missing ones; their results are
discarded. A part that treats all heads alike is given only the heads of this process. Inputs from outside the layer
(parameters, hidden states) receive the sum of the gradients of all processes, because each process only has the
gradients of its own heads.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.features import joined, separated
from hf_posenc.schemes.parts import (
    DistanceBias,
    LogitBias,
    LogitScale,
    PairwiseBias,
    Part,
    QueryKeyMap,
    SeparableBias,
    feature_counts,
)
from hf_posenc.schemes.positions import AttentionPairs, Positions


def refuse_replicas() -> Any:
    """Stands in for the method that `nn.DataParallel` uses to copy a stack, and refuses.

    The copies would share the instance-level patches of the original, and therefore run with its weights.
    """
    raise UnsupportedError(
        "This model runs under torch.nn.DataParallel, which copies modules without their instance-level patches. "
        "Use DistributedDataParallel instead (`accelerate launch` or `torchrun`)."
    )


def refuse_unsynchronised(parts: nn.Module) -> None:
    """Refuses to train parameters that the `DistributedDataParallel` of the call in progress does not synchronise.

    It synchronises only the parameters that the model had when it was wrapped. A model cannot tell that it is wrapped,
    so the check is made in the first call.
    """
    wrapper = None if torch.compiler.is_compiling() else DistributedDataParallel._active_ddp_module
    if wrapper is None or not torch.is_grad_enabled():
        return
    # The caller may have excluded the parameters of the scheme deliberately.
    names = {name for name in wrapper.parameters_to_ignore if "position_encoding" in name}
    known = {id(weight) for weight in wrapper._module_parameters}
    if not names and any(weight.requires_grad and id(weight) not in known for weight in parts.parameters()):
        raise UnsupportedError(
            "This model was wrapped in DistributedDataParallel before it was patched, so the gradients of the "
            "scheme's parameters would not be synchronised: every process would train its own copy. Call "
            "patch_model before the model is wrapped."
        )


PartType = TypeVar("PartType", bound=Part)
Value = TypeVar("Value")


@dataclass(frozen=True)
class HeadShard:
    """The heads of one process. The heads of a layer are divided evenly among the processes, in the order of ranks.

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

    def local(self, tensor: Tensor, axis: int) -> Tensor:
        """The heads of this process, from those of all."""
        count = tensor.shape[axis] // self.size
        return tensor.narrow(axis, count * self.mesh.get_local_rank(), count)

    def repeated_to_all_heads(self, tensor: Tensor) -> Tensor:
        """Repeats `(batch, heads of this process, ...)` to the number of all heads, own heads at their own indices."""
        return tensor.repeat(1, self.size, *(1 for _ in tensor.shape[2:]))

    def with_summed_gradient(self, tensor: Tensor) -> Tensor:
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
    """Base class of parts that are restricted to the heads of one process. `inner` is the part for all heads.

    It has the declarations of `inner`, except the names of parameters.
    """

    def __init__(self, inner: PartType, shard: HeadShard) -> None:
        super().__init__()
        self.inner = inner
        self.shard = shard
        for kind in type(self).__mro__:
            for name in inspect.get_annotations(kind) if issubclass(kind, Part) else ():
                if name != "no_weight_decay" and hasattr(kind, name):
                    setattr(self, name, getattr(inner, name, getattr(kind, name)))

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Calls `check_cache` of the inner part."""
        self.inner.check_cache(cached_length, total_length)

    def run(self, method: Callable[..., Value], *args: Any) -> Value:
        """Calls a method of the inner part, whose parameters receive the sum of the gradients of all processes."""
        exchanged: list[tuple[dict[str, Any], str, Any]] = []
        try:
            if torch.is_grad_enabled():
                for module in self.inner.modules():
                    parameters = cast("dict[str, Any]", module._parameters)
                    for name, parameter in parameters.items():
                        if parameter is not None and parameter.requires_grad:
                            exchanged.append((parameters, name, parameter))
                            parameters[name] = self.shard.with_summed_gradient(parameter)
            return method(*args)
        finally:
            for parameters, name, parameter in exchanged:
                parameters[name] = parameter


class SplitDistanceBias(_SplitPart[DistanceBias], DistanceBias):
    """A distance bias for the heads of one process."""

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads of this process, *distance.shape)` in float32."""
        return self.shard.local(self.run(self.inner, distance), 0)

    def slopes_behind(self, device: torch.device) -> Tensor | None:
        """`(heads of this process,)` float32, or `None`, like the inner bias."""
        slopes = self.run(self.inner.slopes_behind, device) if self.inner.states_slopes else None
        return None if slopes is None else self.shard.local(slopes, 0)


class SplitPairwiseBias(_SplitPart[PairwiseBias], PairwiseBias):
    """A pairwise bias for the heads of one process."""

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """The features of the heads of this process, in the shapes of the inner bias."""
        features = self.run(self.inner.key_features, self.shard.with_summed_gradient(hidden_states))
        return self._by_head(features, lambda heads: self.shard.local(heads, 1))

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads of this process, query_len, key_len)` in float32."""
        bias: Tensor = self.run(self.inner, self._given(pairs))
        return self.shard.local(bias, 1) if self.whole_heads else bias

    def _given(self, pairs: AttentionPairs) -> AttentionPairs:
        """The arguments that are passed to the inner part."""
        if pairs.hidden_states is not None:
            pairs = dataclasses.replace(pairs, hidden_states=self.shard.with_summed_gradient(pairs.hidden_states))
        if not self.whole_heads:
            return pairs
        if pairs.key_features is not None:
            features = self._by_head(pairs.key_features, self.shard.repeated_to_all_heads)
            pairs = dataclasses.replace(pairs, key_features=features)
        # The inner bias may not read queries, but one of several that it adds may return as many heads as they have.
        query, key = self.shard.repeated_to_all_heads(pairs.query), pairs.key
        if self.reads_heads and not self.shard.shared_keys:
            key = self.shard.repeated_to_all_heads(key)
        return dataclasses.replace(pairs, query=query, key=key)

    def _by_head(self, features: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Features with a change of those that belong to heads; features of shared keys stay as they are."""
        by_head, shared = separated(features, *feature_counts(self))
        if shared is None or not self.shard.shared_keys:
            return change(features)
        return joined(None if by_head is None else change(by_head), shared)


class SplitSeparableBias(SplitPairwiseBias, SeparableBias):
    """A separable bias (a term per key minus a term per query) for the heads of one process."""

    separable = True

    def key_terms(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads of this process, key_len)` in float32."""
        terms = self.run(cast("SeparableBias", self.inner).key_terms, self._given(pairs))
        return self.shard.local(terms, 1) if self.whole_heads else terms


class SplitScale(_SplitPart[LogitScale], LogitScale):
    """A logit scale for the heads of one process."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, heads of this process or 1, length)` in float32."""
        scale: Tensor = self.run(self.inner, positions)
        return scale if scale.shape[1] == 1 else self.shard.local(scale, 1)


class SplitQueryKeyMap(_SplitPart[QueryKeyMap], QueryKeyMap):
    """A map for the heads of one process."""

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the phases of the map, of all heads."""
        return self.run(self.inner.phases, positions)

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns the prepared inputs of the inner map."""
        return self.run(self.inner.prepared, phases, dtype)

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """Maps a query `(batch, heads of this process, length, head_dim)`."""
        if not self.whole_heads:
            return self.run(self.inner.map_query, query, phases)
        return self.shard.local(self.run(self.inner.map_query, self.shard.repeated_to_all_heads(query), phases), 1)

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """Maps a key `(batch, key_value_heads of this process, length, head_dim)`."""
        if not self.whole_heads or self.shard.shared_keys:
            return self.run(self.inner.map_key, key, phases)
        return self.shard.local(self.run(self.inner.map_key, self.shard.repeated_to_all_heads(key), phases), 1)


def split_part(part: Part, shard: HeadShard) -> Part:
    """A part of a scheme for the heads of one process."""
    if isinstance(part, QueryKeyMap):
        # A map without parameters that treats all heads alike needs no changes.
        if not part.whole_heads and next(part.parameters(), None) is None:
            return part
        return SplitQueryKeyMap(part, shard)
    if isinstance(part, DistanceBias):
        return SplitDistanceBias(part, shard)
    if isinstance(part, SeparableBias) and part.separable:
        return SplitSeparableBias(part, shard)
    if isinstance(part, LogitBias):
        return SplitPairwiseBias(cast("PairwiseBias", part), shard)
    return SplitScale(cast("LogitScale", part), shard)
