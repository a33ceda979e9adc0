"""The parts of a position encoding.

A scheme is a frozen config, which holds only options and builds at most four parts:

======================  ==========================================================================
`AdditiveEncoding`      positions -> vectors added to the token representations, once per forward
`QueryKeyMap`           positions -> a map of every query and of every key, before the cache
`LogitBias`             a number added to the attention logits: a `DistanceBias` is a function of distance
                        alone; a `PairwiseBias` may read positions, queries and keys; a `SeparableBias` is a
                        `PairwiseBias` that is a number per key minus a number per query
`LogitScale`            positions -> a factor of all logits of a query
======================  ==========================================================================

Together they compute, for query i and key j of one head,

    logit[i, j] = scale(i) * (map_query(q_i, i) . map_key(k_j, j) * scaling + bias(i, j))

This package is independent of transformers. A part receives positions and tensors; the code that places it in a model
is in `hf_posenc.patching`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.positions import AttentionPairs as AttentionPairs, Positions as Positions, Reach as Reach
from hf_posenc.schemes.statements import (
    STATED_METHODS,
    overlooked,
    overrides,
    symmetric_by_methods,
    withdraw_statements,
)
from hf_posenc.schemes.weights import LearnedWeights, exporting, traced

#: Older versions pass no objects to functions that they call while they trace.
_MAY_PREPARE = torch.__version__ >= "2.13"


class DeviceConstant:
    """A constant tensor with one copy per device, unaffected by module casts and meta-device loading.

    A buffer would be rounded by `module.to(torch.bfloat16)` and left uninitialised by meta-device loading. Angles
    computed from bfloat16 frequencies are off by full turns after a few hundred positions. No copy is made in inference
    mode, because it could not be used in training.

    Args:
        values: the constant on the CPU.
    """

    def __init__(self, values: Tensor) -> None:
        if values.is_inference():
            with torch.inference_mode(False):
                values = values.clone()
        self._copies: dict[torch.device, Tensor] = {torch.device("cpu"): values}

    def on(self, device: torch.device) -> Tensor:
        """Returns the constant on `device`. It is copied once per device."""
        if _MAY_PREPARE and torch.compiler.is_compiling() and device.type != "cpu" and not exporting():
            # A graph with an input on the CPU cannot be a CUDA graph.
            _make_copy(self, device)
        copy = self._copies.get(device)
        if copy is None:
            # A tensor made while tracing must not outlive the trace.
            if torch.compiler.is_compiling():
                return self._copies[torch.device("cpu")].to(device)
            _make_copy(self, device)
            copy = self._copies[device]
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"_copies": {torch.device("cpu"): self._copies[torch.device("cpu")]}}


@torch.compiler.assume_constant_result
def _make_copy(constant: DeviceConstant, device: torch.device) -> bool:
    """Makes the copy on a device. A compiler calls this while it traces, and then finds the copy."""
    if device not in constant._copies:
        with torch.inference_mode(False):
            constant._copies[device] = constant._copies[torch.device("cpu")].to(device)
    return True


def mark_parts_of_one_layer(layers: Iterable[Iterable[Part]]) -> None:
    """States of all parts, and those inside them, whether one layer alone has them."""
    inside = ({module for part in parts for module in part.modules()} for parts in layers)
    for module, count in Counter(itertools.chain.from_iterable(inside)).items():
        if isinstance(module, Part):
            module.of_one_layer = count == 1


def shortest(reaches: Iterable[Reach]) -> Reach:
    """Returns the reach of combined parts: the smallest `length` and the largest `made_for`."""
    all_reaches = list(reaches)
    limited = [reach for reach in all_reaches if reach.length is not None]
    limit = min(limited, key=lambda reach: reach.length or 0, default=Reach())
    made_for = max((reach.made_for for reach in all_reaches if reach.made_for is not None), default=None)
    return Reach(limit.length, limit.remedy, made_for)


class Part(LearnedWeights):
    """Base class of all parts: declarations about caches and lengths, and adoption of native weights.

    Most parts of this package are built from two values, the config with their options and the place in a model.
    """

    #: Whether the encoding of a token depends on the current length of the sequence. Such a part can extend a cache
    #: only if `check_cache` accepts it.
    length_dependent: bool = False
    #: Whether the encoding of a token depends on earlier tokens that a cache does not store. The `check_cache` of such
    #: a part refuses every cache. Unlike a length-dependent part, it supports packed documents.
    needs_whole_sequence: bool = False
    #: False if the part depends only on the order of tokens, so that a position map has no effect. A position map of
    #: such parts alone is refused.
    reads_positions: bool = True
    #: Whether the part treats a decrease of the positions as the start of another document.
    finds_documents: bool = False
    #: Whether the part reads `Positions.coordinates` if the caller passes positions on several axes.
    reads_coordinates: bool = False
    #: Whether positions, or their distances, must be integers; a map to real numbers is refused.
    whole_positions: bool = False
    #: The longest sequence that the part can encode; no limit by default.
    length_reach: Reach = Reach()
    #: Whether no other layer has the part. Set where a scheme is placed.
    of_one_layer: bool = False
    #: Names of the part's own parameters that its paper trains without weight decay.
    no_weight_decay: frozenset[str] = frozenset()
    # The methods of the class when its statements were last compared with them.
    _stated_about: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._withdraw_statements()

    @classmethod
    def _withdraw_statements(cls) -> None:
        withdraw_statements(cls)
        cls._stated_about = {name: getattr(cls, name, None) for name in STATED_METHODS}

    def check_statements(self) -> None:
        """Withdraws statements about methods that were set on the class after it was made.

        Raises:
            TypeError: for methods that were set on this part. Faster ways ask its class.
        """
        if not STATED_METHODS.isdisjoint(vars(self)):
            raise TypeError(overlooked(self))
        kind = type(self)
        if kind._stated_about != {name: getattr(kind, name, None) for name in STATED_METHODS}:
            kind._withdraw_statements()

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses to extend a cache of `cached_length` tokens to `total_length` if the result would be wrong.

        Raises:
            UnsupportedError: if tokens encoded at `cached_length` are no longer correct at `total_length`.
        """

    def adopt(self, native: Tensor) -> bool:
        """Copies the weight of the native mechanism that this part replaces; returns whether this was possible."""
        return False


class AdditiveEncoding(Part):
    """Positions -> vectors added to the token representations."""

    #: Number of positions before position 0 that have vectors too.
    offset: int = 0

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length, hidden)` in float32, or in the dtype of the learned table."""
        raise NotImplementedError


class QueryKeyMap(Part):
    """A map of queries and keys that depends only on their own position."""

    #: Number of leading dimensions of a head that are mapped; `None` if any width is accepted.
    rotary_dim: int | None = None
    #: Whether queries and keys are mapped by the same function.
    symmetric: bool = True
    #: Whether the map needs all heads of a layer, or all dimensions of a head, because it differs between heads or
    #: changes their width. In architectures that rotate a slice of a head, or a key shared by all heads, the complete
    #: heads are then mapped later.
    whole_heads: bool = False
    #: Number of neighbouring heads that are mapped together, because they read each other. Processes that share a layer
    #: (tensor parallelism) must have a multiple of it each.
    heads_together: int = 1
    #: Width of a mapped head, as a multiple of its original width.
    width_factor: int = 1
    #: Whether a bias of the scheme maps the heads a second time and expects the mapped dimensions first in each head.
    #: Multi-head latent attention, which rotates the last dimensions of its heads, is then refused.
    mapped_again: bool = False
    #: False if the map of a scaled head is the scaled map of the head, as in a rotation. Otherwise the map receives
    #: heads without the factor that an architecture has multiplied them with.
    reads_magnitude: bool = True
    # Without an annotation, because a part that consists of others does not take it over from them.
    #: Whether it is a `RotaryMap` that its frequencies and its factor describe.
    turns_by_frequencies = False

    @classmethod
    def _withdraw_statements(cls) -> None:
        super()._withdraw_statements()
        if not symmetric_by_methods(cls):
            cls.symmetric = False

    def fix_weights(self) -> None:
        """Computes what depends on weights alone once, for a program in which the weights are constants.

        Exporters call it on a copy of the model before they trace it. By default, nothing is computed.
        """

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """The values that depend on positions but not on q or k; computed once per forward for all layers.

        Returns float32 tensors, `(batch or 1, length, ...)`.
        """
        raise NotImplementedError

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Converts phases for heads of one dtype. `map_query` and `map_key` receive the result instead of the phases.

        Also computed once per forward for all layers. A subclass that overrides this must accept both forms.
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

    #: False if all heads are treated alike, so that the bias of some heads depends only on these heads. With tensor
    #: parallelism, each process then computes the bias for its own heads only.
    whole_heads: bool = True
    # Without annotations, because a part that consists of others does not take these over from them.
    #: Whether it is a `SeparableBias` that computes what its `key_terms` say.
    separable = False
    #: Whether it is a `ContextualRotation` that computes the logits of the heads that it rotates.
    rotates_heads = False

    def summands(self) -> Sequence[LogitBias]:
        """The biases whose sum this is. Each is passed to the kernel in its most specific form."""
        return (self,)


class DistanceBias(LogitBias):
    """A bias that is a function of distance alone, evaluated once per distance instead of once per pair."""

    #: Whether `slopes_behind` is about its `forward`, and not about that of a base class.
    states_slopes = True

    @classmethod
    def _withdraw_statements(cls) -> None:
        super()._withdraw_statements()
        cls.states_slopes = not overrides(cls, "forward", "slopes_behind")

    def forward(self, distance: Tensor) -> Tensor:
        """`distance` is key position minus query position (negative: in the past), of any shape.

        It is int64, or float32 if a position map has produced real positions.

        Returns `(heads, *distance.shape)` in float32.
        """
        raise NotImplementedError

    def slopes_behind(self, device: torch.device) -> Tensor | None:
        """`(heads,)` float32 if the bias of every key up to the query is `slope * distance`, else `None`."""
        return None


#: The bias of pairs that a scheme hides. It is finite, because a blend multiplies it by 0.
HIDDEN = -1e30


@dataclass(frozen=True)
class OtherHeads:
    """Queries and keys from which the logits of each query with its first keys are computed.

    Args:
        query: `(batch, heads, query_len, head_dim)` float32.
        key: `(batch, key_value_heads, greatest of key_counts, head_dim)` float32.
        key_counts: `(query_len,)` int64, the number of these keys of each query.
        near_starts: `(query_len,)` int64, the first of the other keys that each query sees.
    """

    query: Tensor
    key: Tensor
    key_counts: Tensor
    near_starts: Tensor


class PairwiseBias(LogitBias):
    """A bias that reads more than the distance: positions, queries, keys, or the input of the layer."""

    #: Number of features per head and token that `key_features` returns. They are cached with the keys.
    num_features: int = 0
    #: How many of these features, the last ones, belong to a key head and are shared by all query heads that read it.
    #: They are cached once. The other features are numbers of a query head.
    num_shared_features: int = 0
    #: Whether `forward` reads `pairs.query` or `pairs.key`. Such a bias requires heads of their original width.
    reads_heads: bool = False
    #: False if the bias depends on positions and weights only, so that layers with the same part have the same bias.
    reads_content: bool = True
    #: Whether the bias corrects the logits that the layer computes, which must therefore not be modified before the
    #: bias is added. Models that cap their logits before adding biases are refused.
    replaces_logits: bool = False
    #: False if the bias of a pair does not depend on keys after its query. If no query sees later keys, they are then
    #: omitted before the bias is computed.
    reads_later_keys: bool = True
    #: Whether features are combined over neighbouring tokens, so that the first keys of a cache without older ones
    #: would be wrong. Caches that drop old keys (sliding windows) are then refused.
    needs_oldest_keys: bool = False
    #: Whether the bias of a pair adds up something over the tokens between them. Caches that drop such tokens but keep
    #: older ones (attention sinks) are then refused.
    sums_tokens: bool = False
    #: The bias of queries at positions below this is 0. A call without other queries needs no bias.
    zero_below: int = 0
    #: Whether the bias of some pairs is `HIDDEN`, which a logit scale does not change.
    hides_pairs: bool = False

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """The features of new tokens, before the cache.

        Args:
            hidden_states: `(batch, length, hidden)`, the layer's input.

        Returns:
            Float32. `(batch, heads, length, num_features)`; `(batch, key_value_heads, length, num_features)` if all
            features are shared; if some are, as `hf_posenc.schemes.features` describes.
        """
        raise NotImplementedError

    def features(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns `key_features`, and what `forward` reads of the queries, computed from the same states.

        The second is `AttentionPairs.query_features`, `(batch, heads, length, ...)`. It is not cached. `forward` must
        also work without it. By default there is none.
        """
        return self.key_features(hidden_states), None

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32; masked pairs may hold any finite number."""
        raise NotImplementedError

    def other_heads(self, pairs: AttentionPairs) -> OtherHeads | None:
        """Returns the heads from which the bias computes the logits of some pairs, if it does nothing else, or `None`.

        A kernel then needs no bias. `None` also if the keys of these pairs are not the first keys of each query.
        """
        return None


class SeparableBias(PairwiseBias):
    """A bias `terms[j] - terms[i]` for every key j that query i sees.

    The softmax is invariant to the query's term, which is the same for all keys. A kernel needs only the keys' terms.
    """

    separable = True

    def key_terms(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, key_len)` in float32."""
        raise NotImplementedError

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        return rows_of_terms(self.key_terms(pairs), pairs.query_slots)


def rows_of_terms(terms: Tensor, query_slots: Tensor, key_count: int | None = None) -> Tensor:
    """The bias `terms[j] - terms[i]`, `(batch or 1, heads, query_len, key_count)` float32.

    Args:
        terms: `(batch or 1, heads, key_len)` float32.
        query_slots: `(query_len,)` int64, which of the keys belongs to the same token as each query.
        key_count: the number of first keys; all by default.
    """
    first = terms if key_count is None else terms[..., :key_count]
    if query_slots.shape[0] == 1:
        # Uses the minimum number of operators in a decoding step, where calls cost more than the computation.
        return (first - terms.index_select(-1, query_slots)).unsqueeze(-2)
    # As many queries as keys are the same tokens. A graph must not depend on these numbers.
    same = not traced() and query_slots.shape[0] == terms.shape[-1]
    of_queries = terms if same else terms.index_select(-1, query_slots)
    return first.unsqueeze(-2) - of_queries.unsqueeze(-1)


class LogitScale(Part):
    """A factor of all logits of a query: a temperature that depends on its position."""

    #: The factor, if it is the same for every query, or `None`.
    factor_of_all: float | None = None

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, heads or 1, length)` in float32."""
        raise NotImplementedError


class PositionMap(Part):
    """A map from positions to new positions, one per token. Its flags describe its positions, like those of a part."""

    #: Whether all distances stay the same, so that a distance bias does not change.
    keeps_distances: bool = False
    #: Whether it may map integers to real numbers.
    gives_real_positions: bool = False

    def last_position(self, last: int) -> int | None:
        """The greatest new position of tokens at positions up to `last`; `None` if unknown."""
        return None

    def forward(self, positions: Positions) -> Tensor:
        """Returns the new ids, `(batch or 1, length)`, int64 or float32; padding stays negative."""
        raise NotImplementedError

    def renumber(self, positions: Positions) -> Positions:
        """The same tokens with new positions. Coordinates are mapped axis by axis; lengths still count tokens.

        The size of a grid is then unknown, because the map says where tokens are and not where they could be.
        """
        coordinates = positions.coordinates
        if coordinates is not None:
            axes = [dataclasses.replace(positions, ids=axis, coordinates=None) for axis in coordinates.unbind(0)]
            coordinates = torch.stack([self(axis) for axis in axes])
        return dataclasses.replace(positions, ids=self(positions), coordinates=coordinates, extents=None, grid=None)


@dataclass
class SchemeParts:
    """The parts that a config builds; `None` for parts that the scheme does not have.

    Args:
        additive: vectors that are added to the token embeddings.
        query_key_map: changes queries and keys, for example by a rotation.
        logit_bias: is added to the attention logits.
        logit_scale: multiplies the attention logits of each query.
    """

    additive: AdditiveEncoding | None = None
    query_key_map: QueryKeyMap | None = None
    logit_bias: LogitBias | None = None
    logit_scale: LogitScale | None = None

    @classmethod
    def of(cls, part: Part) -> SchemeParts:
        """A single part."""
        kinds = (AdditiveEncoding, QueryKeyMap, LogitBias, LogitScale)
        return cls(*(part if isinstance(part, kind) else None for kind in kinds))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Part]:
        parts = (self.additive, self.query_key_map, self.logit_bias, self.logit_scale)
        return (part for part in parts if part is not None)


def feature_counts(bias: LogitBias | None) -> tuple[int, int]:
    """The number of features per query head of a bias, and the number per key head; 0 and 0 without features."""
    if not isinstance(bias, PairwiseBias):
        return 0, 0
    return bias.num_features - bias.num_shared_features, bias.num_shared_features
