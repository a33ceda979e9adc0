"""The inputs of parts: the positions of tokens and how far they reach, and the queries and keys of one layer."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import SequenceLengthError
from hf_posenc.schemes.weights import (
    AlikeParts,
    KeptValues,
    Layers,
    ModuleType,
    Parts,
    Value,
    assert_in_graph,
    gradients_may_be_shared,
    of_each,
    once_in_graph,
    traced,
)

#: Up to this many keys, layers share what follows from the positions of all pairs.
FEW_KEYS = 128


def softplus(numbers: Tensor) -> Tensor:
    """`log(1 + exp(numbers))`, by the operator that suits: in a graph, torch misjudges the gradient of `softplus`.

    Outside of a graph, `logsigmoid` wakes all threads of a CPU for any number of logits.
    """
    return -nn.functional.logsigmoid(-numbers) if torch.compiler.is_compiling() else nn.functional.softplus(numbers)


def integers_on(device: torch.device, *values: int) -> Tensor:
    """`(len(values),)` int64. Numbers that are copied to a device would make the host wait for it."""
    return torch.stack([torch.full((), value, device=device) for value in values])


def tokens_at(values: Tensor, places: Tensor) -> Tensor:
    """The tokens of values `(batch, heads, length, width)` at some places, `(batch or 1, count)` int64, in their order.

    Returns:
        `(batch, heads, count, width)`.
    """
    if places.shape[0] == 1:
        return values.index_select(2, places[0])
    return values.gather(2, places[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[-1]))


@dataclass(frozen=True)
class Positions:
    """The positions of the tokens of one forward call.

    Args:
        ids: `(batch or 1, length)` int64. The first real token of a sequence has position 0; padding has any negative
            value. A position map may convert them to float32.
        lengths: `(batch or 1, 1)` int64, the length of each sequence, including cached tokens: the last position plus
            1, which is the number of real tokens if positions have no gaps.
        coordinates: `(axes, batch or 1, length)` int64 if tokens have positions on several axes, else `None`: (time,
            height, width) that the caller passed, or the place of a patch, (row, column) or (frame, row, column). 0
            for tokens without a place.
        token_ids: `(batch, length)` int64, the vocabulary ids of the tokens; `None` if the model did not get them.
        extents: `(axes, batch or 1, length)` int64, the sizes in patches of the grid that each token belongs to; `None`
            if the coordinates are not those of a grid.
        placed: `(batch or 1, length)` bool, false for tokens without a place on the grid (class and register tokens,
            padding); `None` if all tokens have one.
        grid: the sizes of the one grid that all tokens with a place belong to, if shapes show it, so that no value of
            `extents` has to be read; `None` if it is unknown or grids differ.
        memo: a dictionary shared by all `Positions` of one forward call of the model, for values that must be drawn or
            computed only once.
    """

    ids: Tensor
    lengths: Tensor
    coordinates: Tensor | None = None
    token_ids: Tensor | None = None
    extents: Tensor | None = None
    placed: Tensor | None = None
    grid: tuple[int, ...] | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def padding(self) -> Tensor:
        """`(batch or 1, 1, length)` bool: whether tokens are padding, broadcastable over heads."""
        return self.remembered("padding", lambda: (self.ids < 0).unsqueeze(1), self.ids)

    @property
    def may_hold_padding(self) -> bool:
        """False if no token is padding. Always true on accelerators, which would have to synchronise, and in graphs."""
        if not self.ids.is_cpu or traced():
            return True
        known: bool | None = self.__dict__.get("_holds_padding")
        if known is None:
            known = self.remembered("any padding", lambda: bool((self.ids < 0).any()), self.ids)
            self.__dict__["_holds_padding"] = known
        return known

    def to(self, device: torch.device) -> Positions:
        """These positions on another device."""
        moved = copy.copy(self)
        vars(moved).update({name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)})
        return moved

    def bounded(self, length: int) -> Positions:
        """These positions, with the note that all are below `length`, which the host knows without reading them."""
        self.remembered("bound", lambda: length, self.ids)
        return self

    def bound(self) -> int | None:
        """A number that all positions are below; `None` in a graph, and if it would have to be read from a device.

        It is at least 1, also if all tokens are padding.
        """
        if traced():
            return None
        noted = self.remembered("bound", lambda: None, self.ids)
        return max(self.length(), 1) if noted is None and self.ids.is_cpu and self.ids.numel() else noted

    def all_below(self, length: int) -> bool:
        """Whether every position is below `length`.

        Reads the positions, at most once per forward call, unless the host knows a bound that answers.
        """
        bound = self.remembered("bound", lambda: None, self.ids)
        return (bound is not None and bound <= length) or self.length() <= length

    def length(self) -> int:
        """The greatest position plus 1, read from the device at most once per forward call."""
        return self.remembered("length", lambda: int(self.ids.max()) + 1, self.ids)

    def remembered(self, name: Hashable, compute: Callable[[], Value], *sources: Tensor) -> Value:
        """`compute()`, evaluated once per forward call for all layers with identical sources.

        Args:
            name: the name of the value.
            compute: computes the value, using only the sources.
            *sources: stored with the result, so that their ids cannot be reused.
        """
        if torch.compiler.is_compiling():
            return once_in_graph(self.memo, name, compute, *sources)
        key = (name, *map(id, sources), torch.is_inference_mode_enabled())
        known: tuple[Value, tuple[Tensor, ...]] | None = self.memo.get(key)
        if known is None:
            known = self.memo[key] = compute(), sources
        return known[0]

    def kept(
        self, part: Parts, name: Hashable, compute: Callable[[], Value], fits: Callable[[Value], bool] | None = None
    ) -> Value:
        """`compute()`, which reads nothing but parameters of a part, or of several.

        Without gradients, a cache keeps it for later tokens that it `fits`, until a parameter is replaced or changed.
        """
        return self.memo[KeptValues].of(part, name, compute, fits) if self.keeps_values else compute()

    def of_weights(
        self, part: ModuleType, name: Hashable, compute: Callable[[Layers], tuple[Tensor | None, ...]]
    ) -> tuple[Any, ...]:
        """What `compute`, which reads nothing but parameters of some parts and what `name` contains, gives for a part.

        Without gradients, it is `kept`. With gradients, it is computed once per forward call for all layers whose parts
        differ only in their parameters. What `compute` returns has an axis of the parts that it receives in front.
        """
        if not torch.is_grad_enabled():
            return self.kept(part, name, lambda: of_each(Layers([part]), compute)[0])
        # A process with some of the heads exchanges the parameters of a layer for tensors while the layer computes.
        exchanged = any(type(weight) is Tensor for weight in part._parameters.values())
        if exchanged or AlikeParts not in self.memo or not gradients_may_be_shared():
            return of_each(Layers([part]), compute)[0]
        known: tuple[Any, ...] | None = self.memo.get((AlikeParts, name, id(part)))
        if known is None:
            layers = Layers(self.memo[AlikeParts].of(part))
            values = layers.apart(of_each(layers, compute))
            for layer, value in zip(layers, values, strict=True):
                self.memo[AlikeParts, name, id(layer)] = value
            known = self.memo[AlikeParts, name, id(part)]
        return known

    @property
    def keeps_values(self) -> bool:
        """Whether `kept` keeps values. A graph, perhaps that of a single layer, cannot look at versions of weights."""
        return not torch.is_grad_enabled() and KeptValues in self.memo and not torch.compiler.is_compiling()

    def first(self, count: int) -> Positions:
        """The positions of the first `count` tokens; lengths are still those of the whole sequences."""
        of_tokens = {name: getattr(self, name) for name in ("ids", "coordinates", "token_ids", "extents", "placed")}
        kept = {name: value[..., :count] for name, value in of_tokens.items() if value is not None}
        return dataclasses.replace(self, **kept)


@dataclass(eq=False)
class AttentionPairs:
    """The queries and keys whose logits one attention layer computes.

    Args:
        query: `(batch, heads, query_len, width)`, after the scheme's own query map.
        key: `(batch, key_value_heads, key_len, width)`, after the scheme's own key map; cached keys included.
        query_slots: `(query_len,)` int64, for each query the index of the key of the same token.
        keys: the positions of the keys, `ids` of shape `(batch or 1, key_len)`.
        scaling: the factor of `query . key` in this layer: usually `head_dim ** -0.5`, 1 where the layer has scaled its
            queries before, or a tensor that fits the logits if heads differ.
        hidden_states: `(batch, query_len, hidden)`, the input from which the layer projects queries and keys; `None`
            if it is not available.
        key_features: float32, the features that `PairwiseBias.key_features` computed for each key, cached ones
            included, in the shape in which it returns them, with `key_len` tokens; `None` for parts without features.
        query_factor: what the layer multiplied its queries with before, which `query` contains and `scaling` does not.
        key_factor: the same for the keys.
        query_features: what `PairwiseBias.features` computed for each query; `None` if it is not available.
    """

    query: Tensor
    key: Tensor
    query_slots: Tensor
    keys: Positions
    scaling: float | Tensor
    hidden_states: Tensor | None = None
    key_features: Tensor | None = None
    query_factor: float | Tensor = 1.0
    key_factor: float | Tensor = 1.0
    query_features: Tensor | None = None
    #: What layers with the same positions and slots share, if one of them has checked the call. Other pairs that are
    #: made of these do not have it.
    memo: dict[Hashable, Any] | None = field(default=None, init=False)

    @property
    def query_scaling(self) -> float | Tensor:
        """The factor of a query times a vector that takes the place of a key, such as that of a distance."""
        return self.scaling * self.key_factor

    @property
    def key_scaling(self) -> float | Tensor:
        """The factor of a key times a vector that takes the place of a query."""
        return self.scaling * self.query_factor

    def of_queries(self, start: int, stop: int) -> AttentionPairs:
        """The queries `[start, stop)` with all keys."""
        if start == 0 and stop == self.query.shape[-2]:
            return self
        return dataclasses.replace(
            self,
            query=self.query[..., start:stop, :],
            query_slots=self.query_slots[start:stop],
            hidden_states=None if self.hidden_states is None else self.hidden_states[:, start:stop],
            query_features=None if self.query_features is None else self.query_features[:, :, start:stop],
        )

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
        """`(batch or 1, query_len)`: the positions of the queries."""
        return self.remembered("query positions", lambda: self.keys.ids.index_select(-1, self.query_slots))

    @property
    def distance(self) -> Tensor:
        """`(batch or 1, query_len, key_len)`: key position minus query position, negative in the past."""
        return self.remembered("distance", lambda: self.keys.ids.unsqueeze(-2) - self.query_positions.unsqueeze(-1))

    def occurring(self, first: int, last: int, buckets: Callable[[Tensor], Tensor] | None = None) -> tuple[int, int]:
        """The distances within `first` to `last` that tokens can have, as far as the host knows their positions.

        With `buckets`, the buckets of distances, which may grow faster than these.
        """
        bound = self.keys.bound()
        if bound is None:
            return first, last
        farthest = bound - 1 if buckets is None else int(buckets(torch.tensor(bound - 1, device="cpu")))
        return max(first, -farthest), min(last, farthest)

    @property
    def steps(self) -> Tensor:
        """`(batch or 1, query_len, key_len)` float32: the absolute distance between query and key."""
        return self.remembered("steps", lambda: self.distance.abs().float())

    @property
    def slot_distance(self) -> Tensor:
        """`(query_len, key_len)` int64: the distance in slots; positive if the key comes after the query."""

        def compute() -> Tensor:
            slots = torch.arange(self.key.shape[-2], device=self.key.device)
            return slots - self.query_slots.unsqueeze(-1)

        return self.remembered("slot distance", compute)

    @property
    def uncounted(self) -> Tensor:
        """`(batch or 1, 1, query_len, key_len)` bool: keys after the query, and padding."""
        return self.remembered("uncounted", lambda: (self.slot_distance > 0) | self.keys.padding.unsqueeze(2))

    @property
    def counts_all(self) -> bool:
        """Whether a single query is known to count all keys. Accelerators would have to synchronise for it."""
        if not self.query_slots.is_cpu or not self.is_single:
            return False
        return self.remembered("counts all", lambda: not bool(self.uncounted.any()))

    @property
    def is_single(self) -> bool:
        """Whether there is a single query. A graph must not depend on the number of queries."""
        return self.query_slots.shape[0] == 1 and (self.memo is not None or not traced())

    def products_of(self, query: Tensor, key: Tensor, uncounted: float, factor: float | Tensor = 1.0) -> Tensor:
        """The inner products of vectors of the queries and of the keys times a factor, in few operators.

        Args:
            query: `(batch, heads, query_len, width)` float32.
            key: `(batch, heads, count, width)` float32, of the last keys, or of all.
            uncounted: what takes the place of the products with keys that are not counted.
            factor: of the products.

        Returns:
            `(batch, heads, query_len, count)` float32.
        """
        shape, counts_all = (*query.shape[:3], key.shape[2]), self.counts_all
        if isinstance(factor, Tensor):
            # It fits the products: OpenAI GPT multiplies them with its causal mask.
            products = query @ key.transpose(2, 3) * (factor if factor.shape[-1] == 1 else factor[..., -shape[3] :])
            return products if counts_all else products.masked_fill(self.uncounted[..., -shape[3] :], uncounted)
        if counts_all:
            return (query if factor == 1 else query * factor) @ key.transpose(2, 3)
        queries, keys = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)

        def mask() -> Tensor:
            hidden = self.uncounted
            return query.new_zeros(hidden.shape).masked_fill(hidden, uncounted)

        added = self.remembered(("uncounted", uncounted), mask)
        added = added if added.shape[-1] == shape[-1] else added[..., added.shape[-1] - shape[-1] :]
        added = added[0] if added.shape[0] == 1 else added.expand(shape).flatten(0, 1)
        return torch.baddbmm(added, queries, keys, alpha=factor).view(shape)

    def ones_from(self, values: Tensor, first: int) -> Tensor | None:
        """`(key_len, key_len)`: values of keys times this are sums over the key `first` later and all after it.

        A product and its gradient are one operator each. `None` for many keys, and where products may be rounded.
        """
        length = values.shape[-1]
        if not values.is_cpu or length > FEW_KEYS or traced():
            return None
        options: dict[str, Any] = {"dtype": values.dtype, "device": values.device}
        return self.remembered(("ones", first, length), lambda: torch.ones(length, length, **options).tril(-first))

    @property
    def is_small(self) -> bool:
        """Whether layers may share numbers of all pairs. A graph must not depend on the number of keys."""
        return self.query_slots.shape[0] == 1 or (not traced() and self.key.shape[-2] <= FEW_KEYS)

    def remembered(self, name: Hashable, compute: Callable[[], Value]) -> Value:
        """`compute()`, evaluated once for all layers if queries or keys are few. It may only use positions and slots.

        Otherwise the value would be a large tensor of all pairs, stored until the forward call ends.
        """
        if self.memo is not None:
            known = self.memo.get(name)
            if known is None:
                value = self.keys.remembered(name, compute, self.keys.ids, self.query_slots)
                known = self.memo[name] = (value,)
            return known[0]
        if self.query_slots.shape[0] != 1 and not self.is_small:
            return compute()
        return self.keys.remembered(name, compute, self.keys.ids, self.query_slots)

    @property
    def expanded_key(self) -> Tensor:
        """`(batch, heads, key_len, width)`: the keys, repeated for every query head that reads them."""
        groups = self.query.shape[1] // self.key.shape[1]
        return self.key if groups == 1 else self.key.repeat_interleave(groups, dim=1)

    @property
    def products(self) -> Tensor:
        """`(batch, heads, query_len, key_len)`: the inner products of queries and keys, without any factor."""
        return self.query @ self.expanded_key.transpose(-1, -2)


def integer_range(start: int, length: int, device: torch.device | str | None = None) -> Tensor:
    """`(1, length)` int64: `start, start + 1, ...`."""
    return torch.arange(start, start + length, device=device).unsqueeze(0)


@dataclass(frozen=True)
class Reach:
    """The maximum length and the intended length of one part, in tokens.

    Args:
        length: the longest sequence that the part can encode; `None` if there is no limit.
        remedy: the end of the error message "A sequence of length 9 is longer than the 8 positions ...". It says which
            positions these are and which option increases their number.
        made_for: the length that the options of the part are configured for, such as `factor * original_max_positions`
            of YaRN; `None` if the options do not specify one.
    """

    length: int | None = None
    remedy: str = ""
    made_for: int | None = None

    def check(self, positions: Positions | Tensor) -> None:
        """Raises an error if a position exceeds the limit.

        The check is skipped when there are no values (the meta device). Values on a device are not read: the host knows
        a bound, unless the caller passed positions. These are checked on the device, as in a compiled graph.

        Args:
            positions: those of a call, or any tensor of them.

        Raises:
            SequenceLengthError: naming the length found, the limit and the remedy.
        """
        if isinstance(positions, Tensor):
            positions = Positions(positions, positions)
        ids = positions.ids
        if self.length is None or ids.is_meta or ids.numel() == 0:
            return
        unread = not (ids.is_cpu or torch.jit.is_tracing()) and positions.bound() is None
        if torch.compiler.is_compiling() or unread:
            assert_in_graph((ids < self.length).all(), f"A token is beyond the {self.length} positions {self.remedy}")
            return
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if not positions.all_below(self.length):
            raise SequenceLengthError(
                f"A sequence of length {positions.length()} is longer than the {self.length} positions {self.remedy}"
            )

    def under(self, last_position: Callable[[int], int | None]) -> Reach:
        """Returns the reach of this part if its positions are mapped.

        Args:
            last_position: a function that takes a position and returns the greatest position that tokens up to it can
                be mapped to. It must not decrease. With `None`, the limit is not changed.
        """
        limit, most = self.length, sys.maxsize
        if limit is None or last_position(most - 1) is None:
            return Reach(limit, self.remedy)

        def beyond(length: int) -> bool:
            last = last_position(length - 1)
            return last is not None and last >= limit

        longest = bisect.bisect_left(range(1, most), True, key=beyond)
        return Reach(None if longest == most - 1 else longest, self.remedy)
