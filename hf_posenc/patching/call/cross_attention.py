"""Cross-attention: queries have the positions of a decoder's tokens, and keys those of an encoder's.

Keys are mapped before they enter the cross-attention cache, which is filled in the first call and read in later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_posenc.attention.backends import attention_with
from hf_posenc.attention.block_attention import AttentionCall
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.attention_site import CacheUpdateHook, LayerCall, without_factor
from hf_posenc.patching.call.cache import first_cache
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.interface_attention import POSITION_BIAS, Rebound
from hf_posenc.patching.call.logit_site import check_heads, form_of_places
from hf_posenc.patching.call.paged_requests import EAGER
from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.positions import Positions


class CrossAttention(Rebound):
    """Stands in for the `forward` of one cross-attention module that uses `ALL_ATTENTION_FUNCTIONS`.

    Args:
        module: the attention module.
        runtime: the runtime of the decoder.
        encoding: the scheme's parts here: a map, a bias of distance, or both.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward with the scheme in place."""
        both = first_cache((*args, *kwargs.values()))
        cache = getattr(both, "cross_attention_cache", None)
        if both is not None and cache is None:
            raise UnsupportedError(
                f"{type(self.module).__name__} was given a {type(both).__name__}, which cannot store the keys of "
                "cross-attention separately. Pass an EncoderDecoderCache, as generate does, or use_cache=False."
            )
        hidden_states = args[0] if args else next(iter(kwargs.values()))
        # The keys in a cache are mapped.
        call = LayerCall(self._state(hidden_states.device), hidden_states, keys_mapped=cache is not None)
        calls = self.calls.of_this_thread()
        depth = len(calls)
        try:
            calls.append(call)
            with CacheUpdateHook(cache if self.encoding.query_key_map is not None else None, self._update, call):
                output = self._forward(self.module, *args, **kwargs)
        finally:
            del calls[depth:]
        if not call.attended:
            raise UnsupportedError(
                f"{type(self.module).__name__} computed its attention without the attention interface, so the scheme "
                "of cross-attention had no effect. Disable that code path."
            )
        return output

    def _update(
        self, call: LayerCall, update: Callable[..., Any], key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces the cache's `update`: maps the keys before they are stored."""
        return update(self._mapped_keys(call.state, key), value, *args, **kwargs)

    def attend(
        self,
        implementation: str | None,
        function: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See `Rebound`."""
        call = self.calls.top
        assert call is not None
        call.attended = True
        state = call.state
        if state.query_length != query.shape[2]:
            raise UnsupportedError(
                f"{type(self.module).__name__} has {query.shape[2]} queries in a call with {state.query_length} "
                "tokens, so their positions are unknown. Leave out cross_attention."
            )
        query_key_map, bias = self.encoding.query_key_map, self.encoding.logit_bias
        if query_key_map is not None:
            replica = state.replica(query_key_map)
            phases = state.shared("cross query phases", lambda: replica.phases(state.positions()), part=query_key_map)
            factor = self.factors_before(kwargs.get("scaling"))[0]
            query = without_factor(replica, replica.map_query, query, phases, factor)
            if not call.keys_mapped:
                key = self._mapped_keys(state, key)
        if bias is None:
            return function(module, query, key, value, mask, *args, **kwargs)
        if kwargs.pop(POSITION_BIAS, None) is not None and getattr(module, "has_relative_attention_bias", True):
            raise UnsupportedError(
                f"{type(module).__name__} already has a position bias in cross-attention, to which a bias of the "
                "scheme would be added. Choose a rotation, or leave out cross_attention."
            )
        keys = encoder_positions(state, key.shape[2], state.device)
        summands = [state.replica(cast("DistanceBias", summand)) for summand in self.encoding.summands]
        form = form_of_places(summands, state.positions().ids, keys.ids, self.encoding.num_heads)
        check_heads(form.heads, query.shape[1])
        given = AttentionCall(implementation or EAGER, function, mask, args, kwargs)
        return attention_with(given, form, module, query, key)(module, query, key, value)

    def _state(self, device: torch.device) -> ForwardState:
        """The state of the decoder's call."""
        state = self.runtime.states.top
        if state is None:
            raise UnsupportedError(
                f"{type(self.module).__name__} was called outside its model, so the positions of its queries and keys "
                "are unknown. Call the model; for gradient checkpointing, use model.gradient_checkpointing_enable()."
            )
        return state.on(device)

    def _mapped_keys(self, state: ForwardState, key: Tensor) -> Tensor:
        query_key_map = self.encoding.query_key_map
        assert query_key_map is not None
        replica, length = state.replica(query_key_map), key.shape[2]

        def compute() -> tuple[Tensor, ...]:
            return replica.phases(encoder_positions(state, length, key.device))

        return replica.map_key(key, state.shared("cross key phases", compute, length, part=query_key_map))


def encoder_positions(state: ForwardState, length: int, device: torch.device | None) -> Positions:
    """The positions of the `length` tokens of an encoder: counted over the real tokens of its mask, -1 at padding."""
    mask = state.encoder_mask

    def compute() -> Positions:
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != length):
            raise UnsupportedError(
                f"The encoder's mask has the shape {tuple(mask.shape)}, and cross-attention has {length} keys, whose "
                "positions are therefore unknown. Pass a mask (batch, keys) with 1 for real tokens."
            )
        return ForwardState(length, attention_mask=mask, device=device).positions()

    return state.shared("encoder positions", compute, length)
