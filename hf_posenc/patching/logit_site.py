"""The bias and the scale of one attention layer, for the call in progress."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_posenc.attention.distances import distance_form, first_key_slot
from hf_posenc.attention.forms import BiasForm, DistanceForm, RowsForm, SeparableForm
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.decoding_memo import remembered_row
from hf_posenc.patching.layer_call import LayerCall, LayerEncoding
from hf_posenc.patching.length_checks import check_cache
from hf_posenc.patching.offloading import weights_at_hand
from hf_posenc.patching.runtime import StackRuntime
from hf_posenc.patching.state import ForwardState
from hf_posenc.schemes.parts import DistanceBias, LogitBias, PairwiseBias, Part, SeparableBias
from hf_posenc.schemes.positions import AttentionPairs, Positions


class LogitSite:
    """Where a scheme changes the logits of one attention module.

    Deep copies and pickles follow the module: the site refers to it as an ordinary attribute.
    """

    def __init__(self, module: nn.Module, runtime: StackRuntime, encoding: LayerEncoding) -> None:
        self.module = module
        self.runtime = runtime
        self.encoding = encoding

    def new_features(self, call: LayerCall) -> Tensor:
        """`(batch, heads, query_len, num_features)` float32 of the new tokens."""
        bias = self.encoding.logit_bias
        assert isinstance(bias, PairwiseBias)
        with weights_at_hand(bias), torch.autocast(call.hidden_states.device.type, enabled=False):
            features: Tensor = bias.key_features(call.hidden_states)
        return features

    def bias(self, call: LayerCall, query: Tensor, key: Tensor, scaling: float) -> BiasForm:
        """The bias of one call, the query's scale included, in the form that says most about it.

        Args:
            call: the call in progress.
            query: `(batch, heads, query_len, width)`, mapped, before the scale.
            key: `(batch, key_value_heads, key_len, width)`, mapped.
            scaling: the layer's factor of `query . key`.
        """
        bias, state = self.encoding.logit_bias, call.state
        assert bias is not None
        form: BiasForm
        if isinstance(bias, DistanceBias):
            form = self._distance_form(bias, state, query, key)
        else:
            check_cache(bias, state)
            form = _pairwise_form(bias, self._pairs(call, query, key, scaling))
        check_heads(form.heads, query.shape[1])
        return form if self.encoding.logit_scale is None else self._scaled_form(form, state, query, key.shape[-2])

    def _distance_form(self, bias: DistanceBias, state: ForwardState, query: Tensor, key: Tensor) -> DistanceForm:
        query_length, key_length = query.shape[-2], key.shape[-2]
        offset = state.slot_offset(query_length, key_length)
        form: DistanceForm = state.shared(
            ("bias", id(bias)),
            lambda: (
                (query_length == 1 and remembered_row(bias, state, key_length, query.device))
                or distance_form(bias, offset, query_length, key_length, query.device)
            ),
            query_length,
            key_length,
        )
        return form

    def _scaled_form(self, form: BiasForm, state: ForwardState, query: Tensor, key_length: int) -> RowsForm:
        scale = self.scale(state, query.device)

        def compute(start: int, stop: int, key_count: int) -> Tensor:
            return form.rows(start, stop, key_count) * scale[..., start:stop].unsqueeze(-1)

        return RowsForm(compute, query.shape[-2], key_length, form.heads)

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
        keys = call.state.key_positions(key_start, key.shape[-2], query.device)
        assert self.encoding.logit_bias is not None
        refuse_cached_coordinates(self.encoding.logit_bias, call.state, keys)
        return AttentionPairs(
            query=query,
            key=key,
            query_slots=torch.arange(query.shape[-2], device=query.device) + (query_start - key_start),
            keys=keys,
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
        factor = self.scale(state, query.device)
        if factor.shape[1] != 1:
            check_heads(factor.shape[1], query.shape[1])
        return query * factor.unsqueeze(-1).to(query.dtype)

    def key_start(self, state: ForwardState, query_length: int, key_length: int) -> tuple[int | Tensor, int | Tensor]:
        """Slots of the first query and of the first key."""
        offset = state.slot_offset(query_length, key_length)
        return offset, first_key_slot(offset, query_length, key_length)


def _pairwise_form(bias: LogitBias, pairs: AttentionPairs) -> BiasForm:
    if isinstance(bias, SeparableBias):
        with torch.autocast(pairs.query.device.type, enabled=False):
            return SeparableForm(bias.key_terms(pairs), pairs.query_slots)

    key_length = pairs.key.shape[-2]
    crops = isinstance(bias, PairwiseBias) and not bias.reads_later_keys

    def compute(start: int, stop: int, key_count: int) -> Tensor:
        own = pairs.of_queries(start, stop)
        if crops and key_count < key_length:
            own = own.of_first_keys(key_count)
        # A bias is float32 in any model; autocast would round what it is made of.
        with torch.autocast(own.query.device.type, enabled=False):
            result: Tensor = bias(own)
        check_heads(result.shape[1], pairs.query.shape[1])
        return result[..., :key_count]

    return RowsForm(compute, pairs.query.shape[-2], key_length, pairs.query.shape[1])


def check_heads(of_scheme: int, of_layer: int) -> None:
    """Requires a number for each head.

    Raises:
        UnsupportedError: for a scheme of other heads.
    """
    if of_scheme != of_layer:
        raise UnsupportedError(
            f"The scheme has numbers of its own for each of {of_scheme} heads, and this layer computes {of_layer}. "
            "Where the heads of a layer are split over processes (tensor parallelism), such a scheme cannot run: load "
            "the model without tp_plan. Otherwise it was built for another architecture: call patch_model again."
        )


def refuse_cached_coordinates(part: Part, state: ForwardState, keys: Positions) -> None:
    """Refuses to place cached keys on several axes, of which nobody has kept more than one.

    Raises:
        UnsupportedError: where `part` would need the others.
    """
    if part.reads_coordinates and state.coordinates is not None and keys.coordinates is None:
        raise UnsupportedError(
            "The tokens of this call stand on several axes, and the keys of cached ones are needed unrotated here, on "
            "axes that the cache does not hold. Pass the whole sequence with use_cache=False."
        )
