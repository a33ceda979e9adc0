"""Data of one attention layer: the parts of its scheme, the call in progress, and how its keys enter the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.grid_state import GridTokens
from hf_posenc.patching.call.split_parts import HeadShard
from hf_posenc.schemes.features import feature_counts
from hf_posenc.schemes.needs import Need, needs_of
from hf_posenc.schemes.parts import DistanceBias, LogitBias, LogitScale, PairwiseBias, Part, QueryKeyMap
from hf_posenc.schemes.rotary.contextual import ContextualRotation, rotation_before_cache
from hf_posenc.schemes.rotary.rotation_kernel import RotationFactors


@dataclass
class LayerEncoding:
    """The parts of a scheme at one attention layer.

    Args:
        query_key_map: applied to queries and keys, or `None`.
        logit_bias: added to the logits, or `None`.
        logit_scale: multiplied with the logits, or `None`.
        causal: whether the layer's queries see only keys at or before them.
        num_heads: number of query heads.
        num_key_value_heads: number of key heads.
        head_dim: width of the heads the scores are computed from.
        num_cached_heads: number of key heads that the layer caches; `None` for all of them.
        shard: the heads of this process, if several processes share the layer (tensor parallelism).
    """

    query_key_map: QueryKeyMap | None
    logit_bias: LogitBias | None
    logit_scale: LogitScale | None
    causal: bool
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    num_cached_heads: int | None = None
    shard: HeadShard | None = None

    def exchange(self, **parts: Part | None) -> None:
        """Sets other parts, by the names of their fields."""
        self.__dict__.update(parts)
        self.__post_init__()

    def __post_init__(self) -> None:
        # Computed once, because every layer reads these in every call.
        bias, parts = self.logit_bias, (self.query_key_map, self.logit_bias, self.logit_scale)
        #: Those that are not `None`.
        self.parts: list[Part] = [part for part in parts if part is not None]
        own, shared = feature_counts(bias)
        #: Number of heads for which the bias caches features next to the keys.
        self.feature_heads = self.num_key_value_heads if shared else self.num_heads
        #: Number of features of each of them per token.
        self.num_features = own + shared
        if shared:
            self.num_features = self.num_heads // self.num_key_value_heads * own + shared
        #: Pairs that are less than this many positions apart have the bias 0.
        self.zero_within = bias.zero_within if isinstance(bias, PairwiseBias) else 0
        #: Whether the scheme changes keys, or caches something next to them.
        self.has_keys = self.num_features > 0 or self.query_key_map is not None
        #: Whether it combines features of neighbouring tokens.
        self.needs_oldest_keys = isinstance(bias, PairwiseBias) and bias.needs_oldest_keys
        #: Whether the bias is a rotation of heads by what the layer's input says, or contains one.
        summands = self.summands = () if bias is None else tuple(bias.summands())
        kinds = [isinstance(one, ContextualRotation) for one in summands]
        whole = self.num_cached_heads in (None, self.num_key_value_heads)
        self.rotates_by_input = any(kinds)
        #: Whether it consists of such rotations only.
        self.only_rotates_by_input = any(kinds) and all(kinds)
        #: The one of them that can be applied to keys before they are cached; the bias then needs no features.
        self.rotation_before_cache = rotation_before_cache(summands) if whole else None
        #: Whether the map makes queries and keys wider.
        self.widens_heads = self.query_key_map is not None and self.query_key_map.width_factor != 1
        #: Whether the logits change by the same bias in every layer with these parts.
        self.repeats_bias = (
            bool(summands)
            and all(isinstance(one, DistanceBias) for one in summands)
            and self.logit_scale is None
            and not self.widens_heads
            and not (self.query_key_map is not None and self.query_key_map.mapped_again)
        )
        #: The same for layers whose parts and heads are the same.
        self.identity = (id(bias), self.causal, self.num_heads, self.num_key_value_heads, self.head_dim, id(self.shard))
        #: Whether the scheme needs no other change than replacing the rotary function.
        self.only_rotates = (
            bias is None
            and self.logit_scale is None
            and (
                self.query_key_map is None
                or (self.query_key_map.width_factor == 1 and not self.query_key_map.mapped_again)
            )
        )
        #: Whether paged keys (continuous batching) must be read before the attention function is called.
        self.reads_pages = self.widens_heads or bias is not None

    def needs(self) -> dict[Need, Part]:
        """What the parts need."""
        return needs_of(self.parts)

    @property
    def has_parameters(self) -> bool:
        """Whether a part has parameters."""
        return any(next(part.parameters(), None) is not None for part in self.parts)


@dataclass
class LayerCall:
    """A record of one call of a layer.

    Args:
        state: the state of the stack's call that this call belongs to.
        hidden_states: `(batch, query_len, hidden)`, the layer's input.
        rotations: number of rotary function calls that were replaced by the scheme's map.
        keys_mapped: whether keys were mapped before they entered the cache.
        attended: whether the attention function was reached.
        writes_pages: whether the attention function has the keys of requests, already mapped. Before transformers 5.24
            it updates the cache itself.
        rotated: what was returned in place of a rotary function, `(batch, heads, query_len, width)` each: the query, or
            query and key of a function that is called for one tensor at a time.
        next_token: the first token whose attention has not been computed, in layers that compute it in parts.
        key_features: the features of the bias for each key, cached ones included, once they are known.
        rotation: the factors with which the layer's input has rotated the keys of the new tokens before they entered
            the cache, if it has.
    """

    state: ForwardState
    hidden_states: Tensor
    rotations: int = 0
    keys_mapped: bool = False
    attended: bool = False
    writes_pages: bool = False
    rotated: tuple[Tensor, ...] = ()
    key_features: Tensor | None = None
    rotation: RotationFactors | None = None
    next_token: int = 0

    def of_next(self, length: int) -> LayerCall:
        """The call for the next `length` tokens, if the layer computes attention for one part of its tokens at a time.

        Layers whose tokens are the patches of several images call the attention function once per image, or once per
        window.
        """
        self.attended = True
        state = self.state
        if not isinstance(state, GridTokens) or state.query_length == length:
            return self
        start, self.next_token = self.next_token, self.next_token + length
        if self.next_token > state.query_length:
            return self
        part = state.shared(("part", start), lambda: state.part(start, length), length)
        hidden_states = self.hidden_states[:, start : self.next_token]
        return dataclasses.replace(self, state=part, hidden_states=hidden_states)


#: In older versions, compiled code deletes the attribute although it has never set it.
_CANNOT_DELETE = torch.__version__ < "2.13"


class CacheUpdateHook:
    """Context manager that replaces the `update` method of a cache by a function.

    Args:
        cache: the cache of this layer's keys, or `None`.
        on_update: `(call, update, key_states, value_states, *args, **kwargs) -> (keys, values)`.
        call: the first argument of the function.
    """

    def __init__(self, cache: Any, on_update: Callable[..., Any], call: LayerCall) -> None:
        self.cache = cache
        self.on_update = on_update
        self.call = call

    def __enter__(self) -> None:
        if self.cache is None:
            return
        # The instance may already carry another wrapper.
        self.own_update = vars(self.cache).get("update")
        self.update = self.cache.update
        self.cache.update = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cache is None:
            return
        if self.own_update is not None:
            self.cache.update = self.own_update
        elif _CANNOT_DELETE and torch.compiler.is_compiling():
            self.cache.update = self.update
        else:
            del self.cache.update

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `on_update` in place of the cache's `update`."""
        return self.on_update(self.call, self.update, *args, **kwargs)
