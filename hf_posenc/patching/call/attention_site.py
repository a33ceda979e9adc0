"""One call of a patched attention layer: queries and keys are mapped, either before or after they enter the cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, StaticLayer

from hf_posenc.attention.backends import Attention
from hf_posenc.attention.forms import BiasForm
from hf_posenc.attention.key_channels import append_features, num_channels, split_features
from hf_posenc.attention.scores import Factor, ScoresMode
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.rotary_functions import RotaryCall
from hf_posenc.patching.call.cache import QUANTISED_LAYER, heads_first
from hf_posenc.patching.call.cache_checks import check_cache, plain_layer
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.grid_state import in_order, numbers_in
from hf_posenc.patching.call.key_positions import key_positions
from hf_posenc.patching.call.outside_stack import state_of_layer
from hf_posenc.patching.call.pairwise_site import PairwiseSite, refuse_cached_coordinates
from hf_posenc.patching.forwards import forward_on_instance
from hf_posenc.schemes.needs import Need
from hf_posenc.schemes.parts import Part, QueryKeyMap
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.refusals import CHANGED_QUERIES, QUANTISED_CACHE
from hf_posenc.schemes.rotary.rotation_kernel import RotationFactors
from hf_posenc.schemes.weights import traced

#: The argument through which models pass their own relative bias to the attention function.
POSITION_BIAS = "position_bias"


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
        pairs: the queries and keys of which the bias was computed, if it was computed for pairs.
        form: the bias, once it is known.
        attention: attention with it.
        next_token: the first token whose attention has not been computed, in layers that compute it in parts.
        mode: what finds the scores of a module that computes them itself.
        key_features: the features of the bias for each key, cached ones included, once they are known.
        query_features: of `AttentionPairs`.
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
    query_features: Tensor | None = None
    rotation: RotationFactors | None = None
    pairs: AttentionPairs | None = None
    form: BiasForm | None = None
    attention: Attention | None = None
    next_token: int = 0
    mode: ScoresMode | None = None

    def of_next(self, length: int) -> LayerCall:
        """The call for the next `length` tokens, if the layer computes attention for one part of its tokens at a time.

        Layers whose tokens are the patches of several images call the attention function once per image, or once per
        window.
        """
        state = self.state
        if not state.of_grid or state.query_length == length:
            return self
        start, self.next_token = self.next_token, self.next_token + length
        if self.next_token > state.query_length:
            return self

        def find() -> ForwardState:
            return in_order(state, torch.arange(start, start + length, device=state.device))

        part = state.shared(("part", start), find, length)
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
        self.cache.update = functools.partial(self.on_update, self.call, self.update)

    def __exit__(self, *error: object) -> None:
        if self.cache is None:
            return
        if self.own_update is not None:
            self.cache.update = self.own_update
        elif _CANNOT_DELETE and torch.compiler.is_compiling():
            self.cache.update = self.update
        else:
            del self.cache.update


Phases = tuple[Tensor, ...]


class AttentionSite(PairwiseSite):
    """Stands in for the `forward` of one attention module instance."""

    #: Sizes of the windows of patches in which the module works, `(rows, columns)`, if it states them.
    window: tuple[int, ...] | None = None

    #: Whether it has not run since the stack was last searched.
    awaited = False
    #: Whether keys may be cached that a map has widened. Otherwise all keys are mapped again in every call.
    caches_wide_keys = True
    #: Whether replacing the rotary function may be the only change of a call, if it is for the scheme.
    may_only_rotate = False
    #: Whether a call has confirmed that the module leaves queries unchanged after rotating them.
    rotation_is_last = False
    #: Whether a call has confirmed that the scheme's map runs in place of the module's rotary function. Keys are then
    #: mapped before they enter the cache and need no further mapping.
    rotates_in_place = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward with the scheme in place."""
        raise NotImplementedError

    def outside_stack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call whose positions are not resolved yet, at the positions that its arguments state."""
        hidden_states = args[0] if args else next(iter(kwargs.values()))
        length = self.runtime.batch_first(hidden_states).shape[1]
        states = self.runtime.states.of_this_thread()
        depth = len(states)
        try:
            states.append(state_of_layer(self.runtime, self.module, args, kwargs, length))
            return self(*args, **kwargs)
        finally:
            del states[depth:]

    def begin_call(self, hidden_states: Tensor) -> LayerCall:
        """Starts a call. `hidden_states` are the module's input, in the axis order of its architecture."""
        hidden_states = self.runtime.batch_first(hidden_states)
        if self.runtime.layout.has_axes:
            return self._begin_on_grid(hidden_states)
        return LayerCall(self.state_for(hidden_states.shape[1], hidden_states.device), hidden_states)

    def _begin_on_grid(self, hidden_states: Tensor) -> LayerCall:
        """Starts a call of a layer of patches, `(tokens, hidden)` or `(batch, rows, columns, hidden)` among others."""
        window = tuple(hidden_states.shape[1:3]) if hidden_states.dim() == 4 else None
        if hidden_states.dim() == 2:
            hidden_states = hidden_states.unsqueeze(0)
        elif hidden_states.dim() == 4:
            # Only the input shows the sizes, and a map in place of the rotary function does not get it.
            self.may_only_rotate = False
            hidden_states = hidden_states.flatten(1, 2)
        length = hidden_states.shape[1]
        if window is not None and self.window is not None and window != self.window:
            # The module receives the whole image, and divides it into its windows itself.
            window, length = self.window, math.prod(self.window)
        return LayerCall(self.state_for(length, hidden_states.device, window), hidden_states)

    def state_for(self, length: int, device: torch.device, window: tuple[int, ...] | None = None) -> ForwardState:
        """The positions of a layer's `length` tokens. On a grid, these may be the tokens of a window of these sizes."""
        state = self.runtime.state_for(length, device, self.window if window is None else window)
        if state.query_length == length:
            return state
        return state.shared("own tokens", lambda: state.by_slots(length), length)

    @property
    def intercepts_cache_update(self) -> bool:
        """Whether keys must be intercepted when the cache is updated."""
        # A graph that read the flag would be compiled once more after a call that is not compiled.
        may_map = torch.compiler.is_compiling() or not self.rotates_in_place
        return (self.encoding.query_key_map is not None and may_map) or self.encoding.num_features > 0

    def note_rotation(self, call: LayerCall) -> None:
        """Records, after a call, whether the scheme's map ran in place of the rotary function.

        Raises:
            UnsupportedError: if it did in earlier calls but not in this one, whose keys were therefore not mapped.
        """
        if not call.rotations and self.rotates_in_place:
            self.refuse_skipped_rotation()
        elif call.rotations and not call.keys_mapped and not torch.compiler.is_compiling():
            self.rotates_in_place = True

    def refuse_skipped_rotation(self) -> None:
        """Refuses a call that skipped the rotary function although earlier calls used it."""
        raise UnsupportedError(
            f"{type(self.module).__name__} called its rotary function in earlier calls but not in this one, so its "
            "keys were not rotated. A change in its config or its arguments has switched the rotation off. Call "
            "patch_model again after such a change."
        )

    def rotate(self, call: LayerCall, rotary: RotaryCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces a rotary function of the architecture: returns its tensors mapped, or unchanged."""
        first, second, time_axis = rotary.tensors(args, kwargs)
        call.state = self.in_order(call.state, rotary, args, kwargs)
        if first.dim() == 3:
            return without_batch(self.rotate_tensors(call, *with_batch(first, second), time_axis))
        return self.rotate_tensors(call, first, second, time_axis)

    def in_order(
        self, state: ForwardState, rotary: RotaryCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ForwardState:
        """The positions in the order of the phases that the layer received, if these are numbers of tokens."""
        if not state.numbered:
            return state
        phases = rotary.phases(args, kwargs)
        return state.shared("in order", lambda: in_order(state, numbers_in(phases)), mask=phases)

    def rotate_tensors(self, call: LayerCall, first: Tensor, second: Tensor | None, time_axis: int) -> Any:
        """Maps a query and a key, or a single tensor for functions that are called once for each."""
        query_key_map = self.encoding.query_key_map
        if query_key_map is not None and self._maps_here(query_key_map, first, second, time_axis):
            first, second = self.apply_map(call.state, first, second, time_axis)
            call.rotations += 1
            if query_key_map.mapped_again:
                call.rotated += (first if time_axis == 2 else first.transpose(1, 2),)
        return first if second is None else (first, second)

    def apply_map(
        self, state: ForwardState, first: Tensor, second: Tensor | None, time_axis: int
    ) -> tuple[Tensor, Tensor | None]:
        """Applies the map to a query and a key, or to a single tensor, in place of the rotary function."""
        query_key_map, for_query = self.prepared(state, first)
        for_key = for_query if second is None or second.dtype == first.dtype else self.prepared(state, second)[1]
        if time_axis != 2:
            first, second = with_heads_first(first, second)
        first = query_key_map.map_query(first, for_query)
        second = None if second is None else query_key_map.map_key(second, for_key)
        return (first, second) if time_axis == 2 else with_heads_first(first, second)

    def _maps_here(self, query_key_map: QueryKeyMap, first: Tensor, second: Tensor | None, time_axis: int) -> bool:
        """Whether the map can run in place of the rotary function; otherwise it is applied to whole heads later."""
        if query_key_map.rotary_dim is not None and first.shape[-1] < query_key_map.rotary_dim:
            return False
        if query_key_map.width_factor != 1:
            # The code that follows, for example a norm, may depend on the width.
            return False
        if self.operand_factors is not None and query_key_map.reads_magnitude:
            return False
        if second is None:
            # A function that is called once for each tensor does not reveal whether it was given a query or a key.
            return query_key_map.symmetric and not query_key_map.whole_heads
        if not query_key_map.whole_heads:
            return True
        heads_axis = 1 if time_axis == 2 else 2
        heads = (first.shape[heads_axis], second.shape[heads_axis])
        all_heads = (self.encoding.num_heads, self.encoding.num_key_value_heads)
        return first.shape[-1] == self.encoding.head_dim and heads == all_heads

    def prepared(self, state: ForwardState, heads: Tensor) -> tuple[QueryKeyMap, tuple[Any, ...]]:
        """The map, and its inputs for the new tokens in the dtype of `heads`.

        They are computed once per forward for all layers that share the map.
        """
        query_key_map = self.encoding.query_key_map
        assert query_key_map is not None

        def inputs() -> tuple[Positions, torch.dtype]:
            check_cache(query_key_map, state)
            return state.positions(), heads.dtype

        if query_key_map in self.encoding.joined:
            joined = state.together(self, "query_key_map", inputs, heads.dtype)
            if joined is not None:
                return query_key_map, joined

        def compute() -> tuple[QueryKeyMap, tuple[Any, ...]]:
            check_cache(query_key_map, state)
            replica = state.replica(query_key_map)
            return replica, replica.prepared(replica.phases(state.positions()), heads.dtype)

        return state.shared(("prepared", heads.dtype), compute, part=query_key_map)

    def key_phases(self, state: ForwardState, query_length: int, key_length: int) -> Phases:
        """Phases of all keys, cached ones included, for layers whose keys are mapped after the cache."""
        query_key_map = self.encoding.query_key_map
        assert query_key_map is not None
        _, key_start = self.key_start(state, query_length, key_length)

        def compute() -> Phases:
            check_cache(query_key_map, state)
            keys = key_positions(state, key_start, key_length)
            refuse_cached_coordinates(query_key_map, state, keys)
            return state.replica(query_key_map).phases(keys)

        return state.shared("key phases", compute, key_length, part=query_key_map)

    def check_rotated(self, call: LayerCall, query: Tensor) -> None:
        """Requires unchanged queries after the rotation if the scheme rotates some pairs a second time."""
        if torch.compiler.is_compiling() or self.rotation_is_last or not call.rotated or query.is_meta:
            return
        pairs = ((query[..., : rotated.shape[-1]], rotated) for rotated in call.rotated)
        if not any(torch.equal(*map(_of_transforms, pair)) for pair in pairs):
            CHANGED_QUERIES.refuse(self.encoding.needs(), f"the scheme of {type(self.module).__name__}")
        self.rotation_is_last = True

    def map_before_kernel(
        self, call: LayerCall, query: Tensor, key: Tensor, factors: tuple[Factor, Factor] = (1.0, 1.0)
    ) -> tuple[Tensor, Tensor]:
        """Maps queries and keys just before the kernel, unless they were mapped in the rotary function or the cache.

        They contain `factors`, without which a map that reads magnitudes gets them.
        """
        query_key_map = self.encoding.query_key_map
        if query_key_map is None or call.rotations:
            return query, key
        if query_key_map.whole_heads and key.shape[1] != self.encoding.num_key_value_heads:
            raise UnsupportedError(
                f"{type(self.module).__name__} computes {key.shape[1]} key heads, but {type(query_key_map).__name__} "
                f"was built for {self.encoding.num_key_value_heads}, with one set of parameters for each."
            )
        replica, prepared = self.prepared(call.state, query)
        if not call.keys_mapped:
            state, lengths = call.state, (query.shape[-2], key.shape[-2])
            # As many queries as keys are the same tokens, but a graph must not depend on these numbers. Positions of
            # the caller are checked, and those in a cache recorded, where the positions of keys are computed.
            same = not traced() and query.dtype == key.dtype and lengths[0] == lengths[1]
            same = same and state.position_ids is None and state.cache_object is None
            phases = prepared if same else self.key_phases(state, *lengths)
            key = without_factor(replica, replica.map_key, key, phases, factors[1])
        return without_factor(replica, replica.map_query, query, prepared, factors[0]), key

    def require_mapped_pages(self, call: LayerCall) -> None:
        """Raises UnsupportedError for keys that were not mapped before they were written to pages."""
        if self.encoding.query_key_map is not None and not (call.rotations or call.keys_mapped):
            raise UnsupportedError(
                f"{type(self.module).__name__} does not write whole keys to its pages, so "
                f"{type(self.encoding.query_key_map).__name__} cannot map them before. Use model.generate() with a "
                "left-padded batch."
            )

    def _map_new_keys(self, call: LayerCall, key: Tensor) -> Tensor:
        """Maps keys before they enter the cache, unless they are mapped already or are not yet complete keys.

        MLA caches a latent from which keys are computed, and JetMoe caches keys that it repeats later. Such keys are
        mapped after the cache, all of them in every call.
        """
        query_key_map = self.encoding.query_key_map
        if query_key_map is None or call.rotations or call.writes_pages:
            return key
        if self.encoding.widens_heads and not self.caches_wide_keys:
            return key
        whole = key.shape[1] == self.encoding.num_key_value_heads or not query_key_map.whole_heads
        if hasattr(self.module, "kv_lora_rank") or key.shape[-1] != self.encoding.head_dim or not whole:
            return key
        if query_key_map.reads_magnitude and self.operand_factors is not None:
            return key
        call.keys_mapped = True
        replica, prepared = self.prepared(call.state, key)
        return replica.map_key(key, prepared)

    def update_cache(
        self,
        call: LayerCall,
        update: Callable[..., Any],
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replaces a cache's `update`: maps the keys, and caches the features of the bias in extra key channels."""
        encoding = self.encoding
        key = key_states if encoding.query_key_map is None else self._map_new_keys(call, key_states)
        features = encoding.num_features
        if not features:
            if encoding.widens_heads:
                self._check_cached(update, key.shape[-1], *args, **kwargs)
            return update(key, value_states, *args, **kwargs)
        is_mapped = encoding.query_key_map is None or call.rotations > 0 or call.keys_mapped
        # Complete heads are rotated by the layer's input before they are cached.
        are_whole = key.shape[1] == encoding.num_key_value_heads and key.shape[-1] == encoding.head_dim
        rotation = encoding.rotation_before_cache if is_mapped and are_whole else None
        new = self.new_features(call)
        if rotation is not None and rotation.angles_of_own_token:
            return update(self.rotated_before_cache(call, key, new), value_states, *args, **kwargs)
        numbers = max(1, encoding.feature_heads // key.shape[1]) * features
        width = key.shape[-1] + num_channels(numbers, key.dtype)
        self._check_cached(update, width, *args, **kwargs)
        layer = None if rotation is None else plain_layer(call.state.cache_object, *args, **kwargs)
        if layer is not None:
            # A graph does not know how many slots of a static cache are filled.
            in_slots = isinstance(layer, StaticLayer) and isinstance(call.state.offset, Tensor)
            keys, length, cached = getattr(layer, "keys", None), call.state.offset, None
            if keys is not None and keys.dim() == 4:  # Otherwise the layer has no keys yet.
                keys = keys[:, :, :length] if isinstance(length, int) and keys.shape[2] != length else keys
                cached = split_features(keys, encoding.feature_heads, features)[1]
            key = self.rotated_before_cache(call, key, new, cached, in_slots)
        keys, values = update(append_features(key, new), value_states, *args, **kwargs)
        keys = heads_first(keys) if keys.dim() == 3 else keys
        if layer is not None:
            return keys[..., : key.shape[-1]], values
        keys, call.key_features = split_features(keys, encoding.feature_heads, features)
        return keys, values

    def _check_cached(self, update: Callable[..., Any], width: int, layer_idx: int = 0, *_: Any, **__: Any) -> None:
        """Refuses a cache that was not filled by this model, such as prefix tuning or the cache of another model.

        It also refuses a cache that would quantise the features of the bias.
        """
        layers = getattr(getattr(update, "__self__", None), "layers", ())
        if not isinstance(layer_idx, int) or layer_idx >= len(layers):
            return
        cache, encoding = layers[layer_idx], self.encoding
        part = encoding.logit_bias if encoding.num_features else encoding.query_key_map
        if encoding.num_features and type(cache) is not DynamicLayer and isinstance(cache, QUANTISED_LAYER):
            QUANTISED_CACHE.refuse({Need.FEATURES: cast("Part", part)}, f"the scheme of {type(self.module).__name__}")
        cached = getattr(cache, "keys", None)
        if not isinstance(cached, Tensor) or cached.shape[-1] == width or not cached.numel():
            return
        if not torch.compiler.is_compiling() and int(cache.get_seq_length()) == 0:
            # Allocated with the width from the config before the first key was known, and still empty.
            cache.is_initialized = False
            return
        raise UnsupportedError(
            f"The cache holds keys of width {cached.shape[-1]}, but with {type(part).__name__} this "
            f"{type(self.module).__name__} caches keys of width {width}. The cached keys did not come from "
            "this model, or it had another dtype then (a cast, or autocast switched on or off), in which the features "
            "of a token have another width. Start with a new cache. Prefix tuning learns keys of the model's original "
            "width, which lack the channels that the scheme adds: use LoRA or prompt tuning with this scheme."
        )


def _of_transforms(tensor: Tensor) -> Tensor:
    """The values of a tensor inside `torch.func.vmap` and other transforms, for all of its rows."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def without_factor(
    query_key_map: QueryKeyMap, mapped: Callable[..., Tensor], heads: Tensor, phases: Any, factor: Factor
) -> Tensor:
    """Maps heads as if they had not been multiplied with a factor, which the result has again."""
    if not query_key_map.reads_magnitude or (not isinstance(factor, Tensor) and factor == 1):
        return mapped(heads, phases)
    return mapped(heads / factor, phases) * factor


def with_batch(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Adds a batch of one row."""
    return first.unsqueeze(0), None if second is None else second.unsqueeze(0)


def without_batch(tensors: Any) -> Any:
    """The inverse of `with_batch`."""
    return tuple(tensor.squeeze(0) for tensor in tensors) if isinstance(tensors, tuple) else tensors.squeeze(0)


def with_heads_first(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Exchanges the axes of tokens and heads."""
    return first.transpose(1, 2), None if second is None else second.transpose(1, 2)


def is_attention_site(module: nn.Module) -> bool:
    """Whether a module is a patched attention layer, of this model or of one that shares it."""
    return isinstance(forward_on_instance(module), AttentionSite)
