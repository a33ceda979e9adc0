"""What every patched attention layer has in common: its parts, and the phases and biases of the call in progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.distances import dense_bias, first_key_slot
from hf_posenc.attention.key_channels import append_features, split_features
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.length_checks import check_cache
from hf_posenc.patching.rotary_calls import RotaryCall
from hf_posenc.patching.runtime import StackRuntime
from hf_posenc.patching.state import ForwardState
from hf_posenc.schemes.parts import DistanceBias, LogitBias, LogitScale, PairwiseBias, QueryKeyMap
from hf_posenc.schemes.positions import AttentionPairs

Phases = tuple[Tensor, ...]


@dataclass
class LayerEncoding:
    """The parts of a scheme at one attention layer.

    Args:
        query_key_map: applied to queries and keys, or `None`.
        logit_bias: added to the logits, or `None`.
        logit_scale: factor of the logits, or `None`.
        causal: whether the layer's queries see only keys at or before them.
        num_heads: number of query heads.
        num_key_value_heads: number of key heads.
        head_dim: width of the heads the scores are computed from.
    """

    query_key_map: QueryKeyMap | None
    logit_bias: LogitBias | None
    logit_scale: LogitScale | None
    causal: bool
    num_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def num_features(self) -> int:
        """How many numbers per head and token the bias keeps beside the keys."""
        return self.logit_bias.num_features if isinstance(self.logit_bias, PairwiseBias) else 0


@dataclass
class LayerCall:
    """What has happened so far in one call of a layer.

    Args:
        state: of the stack's call it belongs to.
        hidden_states: `(batch, query_len, hidden)`, the layer's input.
        rotations: how often a rotary function of the architecture was replaced by the scheme's map.
        keys_mapped: whether keys were mapped on their way into the cache.
        attended: whether the attention function was reached.
        key_features: what the bias keeps of each key's token, cached ones included, once it is known.
    """

    state: ForwardState
    hidden_states: Tensor
    rotations: int = 0
    keys_mapped: bool = False
    attended: bool = False
    key_features: Tensor | None = None


class AttentionSite:
    """Stands in for the `forward` of one attention module instance.

    Deep copies and pickles follow the module: the site refers to it as an ordinary attribute.
    """

    def __init__(self, module: nn.Module, runtime: StackRuntime, encoding: LayerEncoding) -> None:
        self.module = module
        self.runtime = runtime
        self.encoding = encoding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward with the scheme in place."""
        raise NotImplementedError

    @property
    def watches_keys(self) -> bool:
        """Whether keys have to be met on their way into the cache."""
        return self.encoding.query_key_map is not None or self.encoding.num_features > 0

    def rotate(self, call: LayerCall, rotary: RotaryCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for a rotary function of the architecture: maps its tensors, or hands them back as they are."""
        first, second, time_axis = rotary.tensors(args, kwargs)
        return self.rotate_tensors(call, first, second, time_axis)

    def rotate_tensors(self, call: LayerCall, first: Tensor, second: Tensor | None, time_axis: int) -> Any:
        """Maps a query and a key, or one tensor of a function that is called once for each."""
        query_key_map = self.encoding.query_key_map
        if query_key_map is not None and self._maps_here(query_key_map, first, second, time_axis):
            phases = self.phases(call.state, first.device)
            first = mapped(query_key_map.map_query, first, phases, time_axis)
            if second is not None:
                second = mapped(query_key_map.map_key, second, phases, time_axis)
            call.rotations += 1
        return first if second is None else (first, second)

    def _maps_here(self, query_key_map: QueryKeyMap, first: Tensor, second: Tensor | None, time_axis: int) -> bool:
        """Whether a map can act in the place of a rotary function; otherwise it acts on whole heads later."""
        if query_key_map.rotary_dim is not None and first.shape[-1] < query_key_map.rotary_dim:
            return False
        if second is None:
            # A function that is called once for each tensor does not say which one it was given.
            return query_key_map.symmetric and not query_key_map.whole_heads
        if not query_key_map.whole_heads:
            return True
        heads_axis = 1 if time_axis == 2 else 2
        heads = (first.shape[heads_axis], second.shape[heads_axis])
        return first.shape[-1] == self.encoding.head_dim and heads == (
            self.encoding.num_heads,
            self.encoding.num_key_value_heads,
        )

    def phases(self, state: ForwardState, device: torch.device) -> Phases:
        """Phases of the new tokens, computed once per forward for all layers that share the map."""
        query_key_map = self.encoding.query_key_map
        assert query_key_map is not None
        positions = state.positions(device)

        def compute() -> Phases:
            check_cache(query_key_map, state)
            return query_key_map.phases(positions)

        phases: Phases = state.shared(("phases", id(query_key_map)), compute)
        return phases

    def key_phases(self, state: ForwardState, query_length: int, key_length: int, device: torch.device) -> Phases:
        """Phases of all keys, cached ones included, for layers that show them after the cache only."""
        query_key_map = self.encoding.query_key_map
        assert query_key_map is not None
        _, key_start = self.key_start(state, query_length, key_length)

        def compute() -> Phases:
            check_cache(query_key_map, state)
            return query_key_map.phases(state.key_positions(key_start, key_length, device))

        phases: Phases = state.shared(("key phases", id(query_key_map), key_length), compute)
        return phases

    def mapped_late(self, call: LayerCall, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and all keys on their way to the kernel, for what no rotary function and no cache has mapped."""
        query_key_map = self.encoding.query_key_map
        if query_key_map is None or call.rotations:
            return query, key
        self._check_heads(query_key_map, key)
        query = query_key_map.map_query(query, self.phases(call.state, query.device))
        if not call.keys_mapped:
            phases = self.key_phases(call.state, query.shape[-2], key.shape[-2], key.device)
            key = query_key_map.map_key(key, phases)
        return query, key

    def caches_mapped(self, query_key_map: QueryKeyMap) -> bool:
        """Whether mapped keys may go into the cache; otherwise all of them are mapped anew in every call."""
        return True

    def _check_heads(self, query_key_map: QueryKeyMap, key: Tensor) -> None:
        if query_key_map.whole_heads and key.shape[1] != self.encoding.num_key_value_heads:
            raise UnsupportedError(
                f"{type(self.module).__name__} computes {key.shape[1]} key heads where {type(query_key_map).__name__} "
                f"was built for {self.encoding.num_key_value_heads}, one set of parameters each."
            )

    def _map_new_keys(self, call: LayerCall, key: Tensor) -> Tensor:
        """Maps keys on their way into the cache, unless a rotary function has, or what is cached is no key yet (MLA).

        Such keys are mapped behind the cache, all of them in every call.
        """
        query_key_map = self.encoding.query_key_map
        latent = hasattr(self.module, "kv_lora_rank") or key.shape[-1] != self.encoding.head_dim
        if query_key_map is None or call.rotations or latent or not self.caches_mapped(query_key_map):
            return key
        self._check_heads(query_key_map, key)
        call.keys_mapped = True
        return query_key_map.map_key(key, self.phases(call.state, key.device))

    def update_cache(
        self,
        call: LayerCall,
        update: Callable[..., Any],
        key: Tensor,
        value: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Stands in for a cache's `update`: maps keys, and lets what the bias remembers of them travel with them."""
        key = self._map_new_keys(call, key)
        if not self.encoding.num_features:
            return update(key, value, *args, **kwargs)
        keys, values = update(append_features(key, self.new_features(call)), value, *args, **kwargs)
        keys, call.key_features = split_features(keys, self.encoding.num_heads, self.encoding.num_features)
        return keys, values

    def new_features(self, call: LayerCall) -> Tensor:
        """`(batch, heads, query_len, num_features)` float32 of the new tokens."""
        bias = self.encoding.logit_bias
        assert isinstance(bias, PairwiseBias)
        features: Tensor = bias.key_features(call.hidden_states)
        return features

    def bias(self, call: LayerCall, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """`(batch or 1, heads, query_len, key_len)` float32, the query's scale included.

        Args:
            call: the call in progress.
            query: `(batch, heads, query_len, width)`, mapped, before the scale.
            key: `(batch, key_value_heads, key_len, width)`, mapped.
            scaling: the layer's factor of `query . key`.
        """
        bias, state = self.encoding.logit_bias, call.state
        assert bias is not None
        result = self._distance_bias(bias, state, query, key) if isinstance(bias, DistanceBias) else None
        if result is None:
            check_cache(bias, state)
            result = bias(self._pairs(call, query, key, scaling))
        if result.shape[1] != self.encoding.num_heads:
            raise UnsupportedError(
                f"The bias has {result.shape[1]} heads, the layer {self.encoding.num_heads}: it was built for another "
                "architecture."
            )
        if self.encoding.logit_scale is not None:
            result = result * self.scale(state, query.device).unsqueeze(-1)
        return result

    def _distance_bias(self, bias: DistanceBias, state: ForwardState, query: Tensor, key: Tensor) -> Tensor:
        query_length, key_length = query.shape[-2], key.shape[-2]
        offset = state.slot_offset(query_length, key_length)
        result: Tensor = state.shared(
            ("bias", id(bias), query_length, key_length),
            lambda: dense_bias(bias, offset, query_length, key_length, query.device),
        )
        return result

    def _pairs(self, call: LayerCall, query: Tensor, key: Tensor, scaling: float) -> AttentionPairs:
        query_start, key_start = self.key_start(call.state, query.shape[-2], key.shape[-2])
        if self.encoding.num_features and call.key_features is None:
            if key.shape[-2] != query.shape[-2]:
                raise UnsupportedError(
                    f"{type(self.module).__name__} holds {key.shape[-2]} keys for {query.shape[-2]} queries, but its "
                    "keys did not pass through a cache that can be watched, and "
                    f"{type(self.encoding.logit_bias).__name__} has to remember something of each. Use use_cache=False."
                )
            call.key_features = self.new_features(call)
        return AttentionPairs(
            query=query,
            key=key,
            query_slots=torch.arange(query.shape[-2], device=query.device) + (query_start - key_start),
            keys=call.state.key_positions(key_start, key.shape[-2], query.device),
            scaling=scaling,
            hidden_states=call.hidden_states,
            key_features=call.key_features,
        )

    def scale(self, state: ForwardState, device: torch.device) -> Tensor:
        """`(batch or 1, heads or 1, query_len)` float32."""
        logit_scale = self.encoding.logit_scale
        assert logit_scale is not None

        def compute() -> Tensor:
            check_cache(logit_scale, state)
            factor: Tensor = logit_scale(state.positions(device))
            return factor

        result: Tensor = state.shared(("scale", id(logit_scale)), compute)
        return result

    def scaled(self, state: ForwardState, query: Tensor) -> Tensor:
        """The query times its scale, `(batch, heads, query_len, width)`."""
        if self.encoding.logit_scale is None:
            return query
        return query * self.scale(state, query.device).unsqueeze(-1).to(query.dtype)

    def key_start(self, state: ForwardState, query_length: int, key_length: int) -> tuple[int | Tensor, int | Tensor]:
        """Slots of the first query and of the first key."""
        offset = state.slot_offset(query_length, key_length)
        return offset, first_key_slot(offset, query_length, key_length)


def mapped(map_one: Any, tensor: Tensor, phases: Phases, time_axis: int) -> Tensor:
    """Applies `map_query` or `map_key` to a tensor whose token axis is 1 or 2."""
    if time_axis == 2:
        result: Tensor = map_one(tensor, phases)
        return result
    return map_one(tensor.transpose(1, 2), phases).transpose(1, 2)
