"""What parts are told: where the tokens of one call stand, and the queries and keys of one attention layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def traced() -> bool:
    """Whether a compiler or an exporter is watching, which cannot read numbers from tensors."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


@dataclass(frozen=True)
class Positions:
    """Where the tokens of one forward call stand.

    Args:
        ids: `(batch or 1, length)`. int64 as the model counts them: the first real token of a sequence has position 0,
            padding may carry any negative value. A position map may turn them into float32.
        lengths: `(batch or 1, 1)` int64, the length of each sequence, cached tokens included: one more than its last
            position, which is the number of its real tokens where positions have no gaps.
        coordinates: `(axes, batch or 1, length)` int64 where the caller placed tokens on several axes (time, height,
            width), else `None`.
        token_ids: `(batch, length)` int64, the vocabulary ids of the tokens, where the model was given them.
        memo: shared by every `Positions` of one forward call of the model, for what has to be drawn or computed only
            once in it.
    """

    ids: Tensor
    lengths: Tensor
    coordinates: Tensor | None = None
    token_ids: Tensor | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def padding(self) -> Tensor:
        """`(batch or 1, 1, length)` bool: which tokens are padding, for all heads."""
        return self.remembered("padding", lambda: (self.ids < 0).unsqueeze(1), self.ids)

    @property
    def may_hold_padding(self) -> bool:
        """False where no token is known to be padding. Asking an accelerator would stall it, and a graph cannot ask."""
        if self.ids.device.type != "cpu" or traced():
            return True
        return self.remembered("any padding", lambda: bool((self.ids < 0).any()), self.ids)

    def remembered(self, name: str, compute: Callable[[], Value], *sources: Tensor) -> Value:
        """`compute()`, once per forward call for all layers that have the very same sources.

        A compiled graph serves all lengths, and an entry for each would make it serve one only, so there each layer
        computes its own.

        Args:
            name: what is computed.
            compute: computes it from the sources and from nothing else.
            *sources: kept beside the result, so that no other tensor can take the place of one of them.
        """
        if torch.compiler.is_compiling():
            return compute()
        key = (name, *map(id, sources), torch.is_inference_mode_enabled())
        known: tuple[Value, tuple[Tensor, ...]] | None = self.memo.get(key)
        if known is None:
            known = self.memo[key] = compute(), sources
        return known[0]

    def first(self, count: int) -> Positions:
        """Those of the first `count` tokens; lengths are still those of the whole sequences."""
        return dataclasses.replace(
            self,
            ids=self.ids[:, :count],
            coordinates=None if self.coordinates is None else self.coordinates[..., :count],
            token_ids=None if self.token_ids is None else self.token_ids[:, :count],
        )


@dataclass(frozen=True)
class AttentionPairs:
    """The queries and keys whose logits one attention layer is about to compute.

    Args:
        query: `(batch, heads, query_len, width)`, after the scheme's own query map.
        key: `(batch, key_value_heads, key_len, width)`, after the scheme's own key map; cached keys included.
        query_slots: `(query_len,)` int64, which of the keys belongs to the same token as each query.
        keys: where the key tokens stand, `ids` of shape `(batch or 1, key_len)`.
        scaling: the factor the layer multiplies `query . key` with, as a rule `head_dim ** -0.5`.
        hidden_states: `(batch, query_len, hidden)`, what the layer projects queries and keys from; `None` where nobody
            has it.
        key_features: `(batch, heads, key_len, features)` float32, what the part itself computed from each key's token
            (`PairwiseBias.key_features`), cached ones included; `None` for parts without features.
    """

    query: Tensor
    key: Tensor
    query_slots: Tensor
    keys: Positions
    scaling: float
    hidden_states: Tensor | None = None
    key_features: Tensor | None = None

    def of_queries(self, start: int, stop: int) -> AttentionPairs:
        """The queries `[start, stop)` with all keys."""
        if start == 0 and stop == self.query.shape[-2]:
            return self
        return dataclasses.replace(
            self,
            query=self.query[..., start:stop, :],
            query_slots=self.query_slots[start:stop],
            hidden_states=None if self.hidden_states is None else self.hidden_states[:, start:stop],
        )

    def with_features(self, first: int, count: int) -> AttentionPairs:
        """The same pairs with `count` of the features, those of one of several biases that are added."""
        if self.key_features is None or self.key_features.shape[-1] == count:
            return self
        features = self.key_features[..., first : first + count] if count else None
        return dataclasses.replace(self, key_features=features)

    def of_first_keys(self, count: int) -> AttentionPairs:
        """The same queries with the first `count` keys."""
        return dataclasses.replace(
            self,
            key=self.key[..., :count, :],
            keys=self.keys.first(count),
            key_features=None if self.key_features is None else self.key_features[:, :, :count],
        )

    @property
    def query_positions(self) -> Tensor:
        """`(batch or 1, query_len)`."""
        return self.remembered("query positions", lambda: self.keys.ids.index_select(-1, self.query_slots))

    @property
    def distance(self) -> Tensor:
        """`(batch or 1, query_len, key_len)`: key position minus query position, negative in the past."""
        return self.remembered("distance", lambda: self.keys.ids.unsqueeze(-2) - self.query_positions.unsqueeze(-1))

    @property
    def steps(self) -> Tensor:
        """`(batch or 1, query_len, key_len)` float32: how far apart query and key are, to whichever side."""
        return self.remembered("steps", lambda: self.distance.abs().float())

    @property
    def slot_distance(self) -> Tensor:
        """`(query_len, key_len)` int64: the same, counted in slots; positive exactly where a key comes later."""

        def compute() -> Tensor:
            slots = torch.arange(self.key.shape[-2], device=self.key.device)
            return slots - self.query_slots.unsqueeze(-1)

        return self.remembered("slot distance", compute)

    def remembered(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, which reads nothing but where queries and keys stand: for one query once for all layers.

        For many queries it would be a tensor of all pairs, held until the forward call ends.
        """
        if self.query_slots.shape[0] != 1:
            return compute()
        return self.keys.remembered(name, compute, self.keys.ids, self.query_slots)

    @property
    def expanded_key(self) -> Tensor:
        """`(batch, heads, key_len, width)`: the keys, once for every query head that reads them."""
        groups = self.query.shape[1] // self.key.shape[1]
        return self.key if groups == 1 else self.key.repeat_interleave(groups, dim=1)


def integer_range(start: int, length: int, device: torch.device | str | None = None) -> Tensor:
    """`(1, length)` int64: `start, start + 1, ...`."""
    return torch.arange(start, start + length, device=device).unsqueeze(0)
