"""The inputs of the pairwise biases of one attention layer: places of keys, features, and rotations by the input."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.attention.block_attention import without_autocast
from hf_posenc.attention.forms import BiasForm, FusedForm, RowsForm
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache_checks import check_cache, is_accepted
from hf_posenc.patching.call.evicting_cache import refuse_smaller_cache
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.logit_site import Factors, LogitSite, check_heads, wrong_shape
from hf_posenc.schemes.features import pairs_of_parts
from hf_posenc.schemes.parts import LogitBias, PairwiseBias, Part, SeparableBias
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.refusals import EVICTING_CACHE, POOLED_PATCHES, SLIDING_CACHE
from hf_posenc.schemes.rotary.contextual import ContextualRotation
from hf_posenc.schemes.rotary.rotation_kernel import apply_rotation
from hf_posenc.schemes.weights import assert_in_graph, traced

if TYPE_CHECKING:
    from hf_posenc.patching.call.attention_site import LayerCall


class PairwiseSite(LogitSite):
    """Computes biases and rotations that read the queries, keys or inputs of one attention module."""

    def pairwise_forms(
        self, call: LayerCall, query: Tensor, key: Tensor, factors: Factors, summands: Sequence[LogitBias]
    ) -> dict[LogitBias, BiasForm]:
        """The forms of summands that are no distance biases, for the arguments of the method `bias`."""
        bias, every = self.encoding.logit_bias, self.encoding.summands
        assert bias is not None
        check_cache(bias, call.state)
        call.pairs = whole = self._pairs(call, query, key, factors)
        pairs = dict(zip(every, [whole] if len(every) == 1 else pairs_of_parts(every, whole), strict=True))
        return {part: _pairwise_form(part, call.state, pairs[part], self) for part in summands}

    def refuse_pooled_keys(self, queries: int, keys: int) -> None:
        """Refuses attention in which queries and keys are not the same patches."""
        if queries != keys and self.encoding.parts:
            subject = f"the scheme of {type(self.module).__name__} ({queries} queries, {keys} keys)"
            POOLED_PATCHES.refuse(self.encoding.needs(), subject)

    def find_features(self, call: LayerCall, query_length: int, key_length: int) -> None:
        """Computes the features of the keys unless the cache had them. Without a cache there are only new keys.

        Raises:
            UnsupportedError: if there are cached keys, whose features are unknown.
        """
        if not self.encoding.num_features or call.key_features is not None or call.rotation is not None:
            return
        if key_length != query_length:
            raise UnsupportedError(
                f"{type(self.module).__name__} has {key_length} keys for {query_length} queries, but they did not "
                f"pass through a cache whose update can be intercepted, and {type(self.encoding.logit_bias).__name__} "
                "has to cache features of each key. Use use_cache=False."
            )
        call.key_features = self.new_features(call)

    def new_features(self, call: LayerCall) -> Tensor:
        """`(batch, feature heads, query_len, features)` float32 of the new tokens. The call keeps those of queries."""
        bias = self.encoding.logit_bias
        assert isinstance(bias, PairwiseBias)
        with without_autocast(call.hidden_states.device):
            features, call.query_features = call.state.replica(bias).features(call.hidden_states)
        return features

    def rotated_by_input(self, call: LayerCall, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Applies the rotations in the bias to queries and keys of the shapes that `bias` receives.

        Keys that were rotated before they entered the cache are returned as they are.
        """
        bias = self.encoding.logit_bias
        assert bias is not None
        check_cache(bias, call.state)
        rotation = self.encoding.rotation_before_cache
        if rotation is not None and call.rotation is not None:
            check_heads(self.encoding.num_heads, query.shape[1])
            with without_autocast(query.device):
                return apply_rotation(query, call.rotation, rotation.layout), key
        # Rotated heads are multiplied by the layer itself, with its own factor.
        pairs = self._pairs(call, query, key, (1.0, 1.0, 1.0))
        check_heads(self.encoding.num_heads, query.shape[1])
        summands = self.encoding.summands
        for summand, of_summand in zip(summands, pairs_of_parts(summands, pairs), strict=True):
            if isinstance(summand, ContextualRotation) and summand.rotates_heads:
                if of_summand.query is not query:
                    of_summand = dataclasses.replace(of_summand, query=query, key=key)
                with without_autocast(query.device):
                    query, key = call.state.replica(summand).rotated(of_summand)
        return query, key

    def rotated_before_cache(
        self, call: LayerCall, key: Tensor, features: Tensor, cached: Tensor | None = None, in_slots: bool = False
    ) -> Tensor:
        """Rotates new keys, and keeps the factors for the queries.

        Args:
            call: the call in progress.
            key: `(batch, key_value_heads, query_len, head_dim)`.
            features: those of the new tokens.
            cached: those of cached tokens, or `None` if there are none, or if they are not needed.
            in_slots: whether `cached` includes slots for the new tokens, and their numbers are a tensor.
        """
        assert self.encoding.rotation_before_cache is not None
        rotation, state, new = call.state.replica(self.encoding.rotation_before_cache), call.state, key.shape[-2]
        with without_autocast(key.device):
            if rotation.angles_of_own_token:
                call.rotation = rotation.factors(features, state.positions(), key.dtype)
            elif cached is not None and in_slots:
                keys, slots = self._places(state, new, cached.shape[-2], as_cached=True)
                of_slots = cached.index_copy(-2, slots, features)
                call.rotation = rotation.factors_in_slots(of_slots, keys, slots, key.dtype)
            else:
                length = new if cached is None else cached.shape[-2] + new
                keys, _ = self._places(state, new, length, as_cached=True)
                if not traced() and length > new and is_accepted(state.cache_object):
                    before = keys.ids[:, :-new]
                    # Some of the tokens by whose angles cached keys were rotated have been dropped.
                    if bool(((before >= 0).sum(-1) <= before.amax(-1)).any()):
                        EVICTING_CACHE.refuse(self.encoding.needs(), f"the scheme of {type(self.module).__name__}")
                call.rotation = rotation.factors(features, keys, key.dtype, cached)
            return apply_rotation(key, call.rotation, rotation.layout)

    def _pairs(self, call: LayerCall, query: Tensor, key: Tensor, factors: Factors) -> AttentionPairs:
        state, query_length, key_length = call.state, query.shape[-2], key.shape[-2]
        self.find_features(call, query_length, key_length)
        if state.dropped:
            EVICTING_CACHE.refuse(self.encoding.needs(), f"the scheme of {type(self.module).__name__}")
            bias = self.encoding.logit_bias
            state.shared(("smaller cache", id(bias)), lambda: refuse_smaller_cache(state, bias), everywhere=True)
        if self.encoding.needs_oldest_keys:
            self._require_oldest_keys(self.key_start(state, query_length, key_length)[1])
        keys, query_slots = self._places(state, query_length, key_length)
        assert self.encoding.logit_bias is not None
        if state.coordinates is not None:
            refuse_cached_coordinates(self.encoding.logit_bias, state, keys)
        inputs = (call.hidden_states, call.key_features, *factors[1:], call.query_features)
        return AttentionPairs(query, key, query_slots, keys, factors[0], *inputs)

    def _require_oldest_keys(self, key_start: int | Tensor) -> None:
        """Refuses a cache that has dropped its oldest keys."""
        if isinstance(key_start, int) and key_start == 0:
            return
        message = SLIDING_CACHE.refusal(self.encoding.needs(), f"the scheme of {type(self.module).__name__}")
        if isinstance(key_start, int):
            raise UnsupportedError(message)
        assert_in_graph(key_start == 0, message)


def _pairwise_form(part: LogitBias, state: ForwardState, pairs: AttentionPairs, site: PairwiseSite) -> BiasForm:
    bias, heads, key_length = state.replica(part), pairs.query.shape[1], pairs.key.shape[-2]
    if isinstance(bias, SeparableBias) and bias.separable:
        with without_autocast(pairs.query.device):
            terms = bias.key_terms(pairs)
        if terms.ndim != 3:
            raise wrong_shape(bias, terms, "(batch or 1, heads, key_len)")
        return FusedForm(None, pairs.query.shape[-2], key_length, terms=terms, query_slots=pairs.query_slots)

    crops = isinstance(bias, PairwiseBias) and not bias.reads_later_keys
    repeats = isinstance(bias, PairwiseBias) and not bias.reads_content and pairs.is_small
    lengths, alone = (pairs.query.shape[-2], key_length), part in site.encoding.joined

    def compute(start: int, stop: int, key_count: int) -> Tensor:
        if repeats and alone and (start, stop, key_count) == (0, *lengths):
            joined: Tensor | None = state.together(site, "logit_bias", lambda: (pairs,), *lengths)
            if joined is not None:
                return joined
        if repeats:
            rows = functools.partial(evaluated, start, stop, key_count)
            return state.shared(("rows", start), rows, stop, key_count, part=part)
        return evaluated(start, stop, key_count)

    def evaluated(start: int, stop: int, key_count: int) -> Tensor:
        chosen = pairs if pairs.query.shape[-2] == 1 else pairs.of_queries(start, stop)
        if crops and key_count < key_length:
            chosen = chosen.of_first_keys(key_count)
        # The bias is float32 in every model. Autocast would compute it in lower precision.
        with without_autocast(chosen.query.device):
            result: Tensor = bias(chosen)
        if result.ndim != 4 or result.shape[1] == 1 != heads:
            raise wrong_shape(bias, result, f"(batch or 1, {heads} heads, query_len, key_len)")
        check_heads(result.shape[1], heads)
        return result if result.shape[-1] == key_count else result[..., :key_count]

    other = None
    if isinstance(bias, PairwiseBias) and pairs.query.shape[-2] > 1 and not torch.is_grad_enabled() and not traced():
        with without_autocast(pairs.query.device):
            other = bias.other_heads(pairs)
    return RowsForm(compute, pairs.query.shape[-2], key_length, pairs.query.shape[1], other)


def refuse_cached_coordinates(part: Part, state: ForwardState, keys: Positions) -> None:
    """Refuses multi-axis positions for cached keys, because only one axis is recorded."""
    if part.reads_coordinates and state.coordinates is not None and keys.coordinates is None:
        raise UnsupportedError(
            "The tokens of this call have positions on several axes. This layer needs those of the cached keys too, "
            "and the cache does not hold them. Pass the whole sequence with use_cache=False."
        )
