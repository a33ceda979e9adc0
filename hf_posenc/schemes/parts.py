"""What a position encoding is made of.

A scheme is a frozen config (its options, and nothing else) that builds at most four parts:

======================  ==========================================================================
`AdditiveEncoding`      positions -> vectors added to the token representations, once per forward
`QueryKeyMap`           positions -> a map of every query and of every key, before the cache
`LogitBias`             a number added to the attention logits: a `DistanceBias`, which is a function of
                        distance alone, or a `PairwiseBias`, which may read positions, queries and keys; of
                        these, a `SeparableBias` is a number per key minus one per query
`LogitScale`            positions -> a factor of all logits of a query
======================  ==========================================================================

Together they compute, for query i and key j of one head,

    logit[i, j] = scale(i) * (map_query(q_i, i) . map_key(k_j, j) * scaling + bias(i, j))

Nothing in this package knows about transformers: a part receives positions and tensors, and the code
that places it inside a model lives in `hf_posenc.patching`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.reach import Reach


class Part(nn.Module):
    """Common to all parts: what a cache may assume, and how native weights are taken over."""

    #: True where the encoding of a token depends on how long the sequence has become since. Such a part
    #: cannot extend a cache unless `check_cache` says that the cached tokens are still right.
    length_dependent: bool = False
    #: True where a token is encoded by the tokens before it, which a cache does not keep. Such a part refuses to extend
    #: any cache in `check_cache`; unlike a length-dependent one it may see several documents in a row.
    needs_whole_sequence: bool = False
    #: False where the part goes by the order of tokens alone, so that other positions change nothing. A position map
    #: over nothing else is refused.
    reads_positions: bool = True
    #: Whether the part reads `Positions.coordinates` where the caller places tokens on several axes.
    reads_coordinates: bool = False
    #: True where positions, or their distances, have to be whole numbers; a map that gives real ones is refused.
    whole_positions: bool = False
    #: How long a sequence the part can encode; without a limit by default.
    length_reach: Reach = Reach()
    #: Names of the part's own parameters that its paper trains without weight decay.
    no_weight_decay: frozenset[str] = frozenset()

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses to extend a cache of `cached_length` tokens to `total_length` if that would be wrong.

        Raises:
            UnsupportedError: where tokens computed at `cached_length` are no longer right at `total_length`.
        """

    def adopt(self, native: Tensor) -> bool:
        """Takes over the weight of the stock mechanism this part replaces; returns whether it could."""
        return False


def take_declarations(part: Part, inner: Part) -> None:
    """Declares about `part` all that its kind of part declares about `inner`, but for names of parameters."""
    for kind in type(part).__mro__:
        for name in inspect.get_annotations(kind) if issubclass(kind, Part) else ():
            if name != "no_weight_decay" and hasattr(kind, name):
                setattr(part, name, getattr(inner, name, getattr(kind, name)))


def declare_any(part: Part, parts: Sequence[Part]) -> None:
    """Declares about `part`, which is made of others, every flag of its kind that holds for any of them."""
    for kind in type(part).__mro__:
        for name in inspect.get_annotations(kind) if issubclass(kind, Part) else ():
            if isinstance(getattr(kind, name, None), bool):
                setattr(part, name, any(getattr(one, name, False) for one in parts))


class AdditiveEncoding(Part):
    """Positions -> vectors added to the token representations."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length, hidden)` in float32, or in the dtype of the learned table."""
        raise NotImplementedError


class QueryKeyMap(Part):
    """A map of queries and keys that depends on their own position only."""

    #: How many leading dimensions of a head are mapped; `None` where any width is.
    rotary_dim: int | None = None
    #: True where queries and keys are mapped by the same function.
    symmetric: bool = True
    #: True where the map needs all heads of a layer, or all dimensions of a head: it differs between heads, or changes
    #: their width. Architectures that rotate a slice, or a key shared by all heads, are then mapped after joining.
    whole_heads: bool = False
    #: Width of a mapped head, as a multiple of what it was.
    width_factor: int = 1
    #: True where a bias of the scheme maps the heads further and looks for the mapped dimensions in front of each head;
    #: multi-head latent attention, which rotates the end of its heads, is refused.
    mapped_again: bool = False

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Everything that depends on positions but not on q or k; computed once per forward for all layers.

        Returns float32 tensors, `(batch or 1, length, ...)`.
        """
        raise NotImplementedError

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """What `map_query` and `map_key` are given in place of the phases, for heads of one dtype.

        Also computed once per forward for all layers; whoever returns something else here takes phases as well.
        """
        return phases

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`query` is `(batch, heads, length, head_dim)`; the result has the same dtype.

        The last dimension may change, if it does so for keys too.
        """
        raise NotImplementedError

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`key` is `(batch, key_value_heads, length, head_dim)`; the result has the same dtype."""
        raise NotImplementedError


class LogitBias(Part):
    """A number added to every attention logit. Subclass `DistanceBias` or `PairwiseBias`."""

    #: False where every head is treated like any other, so that the bias of a few heads needs these heads only.
    #: Processes that share the heads of a layer (tensor parallelism) then compute nothing for those of the others.
    whole_heads: bool = True

    def summands(self) -> Sequence[LogitBias]:
        """The biases that this one is the sum of. Each reaches the kernel in the form that says most about it."""
        return (self,)


class DistanceBias(LogitBias):
    """A bias that is a function of distance alone, evaluated once per distance and never per pair."""

    def forward(self, distance: Tensor) -> Tensor:
        """`distance` is key position minus query position (negative: in the past), of any shape.

        int64, or float32 where a position map has turned positions into real numbers.

        Returns `(heads, *distance.shape)` in float32.
        """
        raise NotImplementedError

    def slopes_behind(self, device: torch.device) -> Tensor | None:
        """`(heads,)` float32 where the bias of every key behind the query is `slope * distance`; `None` elsewhere."""
        return None


class PairwiseBias(LogitBias):
    """A bias that reads more than the distance: positions, queries, keys, or what their tokens were projected from."""

    #: How many numbers per head and token `key_features` returns. They are cached beside the keys.
    num_features: int = 0
    #: True where `forward` reads `pairs.query` or `pairs.key`; such a bias fits heads of unchanged width only.
    reads_heads: bool = False
    #: True where the bias corrects logits that the layer computes itself, so that nothing may come between them; models
    #: that cap their logits before biases are refused.
    replaces_logits: bool = False
    #: False where the number of a pair is the same whatever stands behind its query; where no query sees later keys,
    #: they are then left out before anything is computed.
    reads_later_keys: bool = True
    #: Pairs less than this many positions apart have the number 0. A call without any others needs no bias.
    zero_within: int = 0

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """`(batch, length, hidden)` -> `(batch, heads, length, num_features)` float32, before the cache."""
        raise NotImplementedError

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32; masked pairs may hold any finite number."""
        raise NotImplementedError


class SeparableBias(PairwiseBias):
    """A bias `terms[j] - terms[i]` of every key that a query sees.

    Softmax does not see what a query has for all keys, so the terms of the keys are all that a kernel needs.
    """

    def key_terms(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, key_len)` in float32."""
        raise NotImplementedError

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        terms = self.key_terms(pairs)
        return terms.unsqueeze(-2) - terms.index_select(-1, pairs.query_slots).unsqueeze(-1)


class LogitScale(Part):
    """A factor of all logits of a query: a temperature that depends on its position."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, heads or 1, length)` in float32."""
        raise NotImplementedError


@dataclass
class SchemeParts:
    """The parts a config was built into; `None` stands for "this scheme does not act there"."""

    additive: AdditiveEncoding | None = None
    query_key_map: QueryKeyMap | None = None
    logit_bias: LogitBias | None = None
    logit_scale: LogitScale | None = None

    def __iter__(self) -> Iterator[Part]:
        parts = (self.additive, self.query_key_map, self.logit_bias, self.logit_scale)
        return (part for part in parts if part is not None)
