"""Checks of one layer in a forward call that other layers reuse.

For a small model or a single new token, checks and decisions take longer than the computation. The first layer decides
for all layers with the same parts if their bias is a function of distance. It also decides for layers of the same kind,
whose parts differ only in their weights, if they only have to compute the rows of their own bias.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hf_posenc.attention.backends import Attention, MatrixAttention, MatrixKernel
from hf_posenc.attention.block_attention import for_kernel, single_query_attention
from hf_posenc.attention.blockwise import SIZES
from hf_posenc.attention.forms import FusedForm
from hf_posenc.patching.call.attention_site import POSITION_BIAS, LayerCall
from hf_posenc.patching.call.key_positions import bound_of_unread
from hf_posenc.schemes.parts import PairwiseBias, SeparableBias, rows_of_terms
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.rotary.rotation_kernel import apply_rotation
from hf_posenc.schemes.weights import exporting, gradients_may_be_shared, traced

if TYPE_CHECKING:
    from hf_posenc.patching.call.interface_attention import InterfaceAttention

#: Everything that determines how attention is computed, except tensor values and the parts of the scheme.
Arguments = tuple[Any, ...]


@dataclass(eq=False)
class CheckedLayer:
    """What a layer has found.

    It does not refer to the state of the call, because the state refers to it, and the cycle would delay the release of
    memory.

    Args:
        arguments: the arguments of its attention function.
        identity: of its `LayerEncoding`.
        attention: its attention with the bias, for layers with the same parts; `None` if others cannot use it.
        learned: whether this holds a learned bias.
        kernel: the attention of several queries, for layers that compute the rows of their own bias. A single query
            needs none: its row is the mask of the attention function.
        has_rows: whether layers of the same kind may compute the rows of their own bias, or rotate their own queries.
        by_slots: whether the bias is a function of the distance between slots.
        places: where the pairs of a bias are, if it is computed for pairs: slots of the queries, positions of the keys,
            and the factor of `query . key`.
        rows: biases that several layers share, by the id of the part.
        memo: of `AttentionPairs`, if there is one query.
    """

    arguments: Arguments
    identity: tuple[Any, ...]
    attention: Attention | None
    learned: bool
    kernel: MatrixKernel | None
    has_rows: bool
    by_slots: bool
    places: tuple[Tensor, Positions, float | Tensor] | None
    rows: dict[int, Tensor] = field(default_factory=dict)
    memo: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, site: InterfaceAttention, call: LayerCall, arguments: Arguments, query: Tensor, key: Tensor
    ) -> CheckedLayer | None:
        """What a layer has found in its call; `None` if other layers have to find it too."""
        encoding, pairs = site.encoding, call.pairs
        mapped = encoding.query_key_map is None or call.rotations > 0
        if not mapped or call.state.sequence is not None or exporting():
            return None
        bias = encoding.logit_bias
        assert bias is not None
        learned = torch.is_grad_enabled() and any(weight.requires_grad for weight in bias.parameters())
        kernel = call.attention.kernel if isinstance(call.attention, MatrixAttention) else None
        differs = encoding.differs_in_rows or (encoding.differs_in_rotation and call.rotation is not None)
        has_rows = differs and not traced() and _may_compute_rows(arguments, query, key, call.attention)
        shares = encoding.repeats_bias and (not learned or gradients_may_be_shared())
        if not has_rows and not shares:
            return None
        return cls(
            arguments,
            encoding.identity,
            call.attention if shares else None,
            learned,
            kernel,
            has_rows,
            isinstance(call.form, FusedForm) and call.form.terms is None,
            None if pairs is None else (pairs.query_slots, pairs.keys, pairs.scaling),
        )

    def attend(
        self,
        site: InterfaceAttention,
        call: LayerCall,
        arguments: Arguments,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Any:
        """The attention of another layer: `(output, probabilities or None)`.

        Args:
            site: the layer.
            call: its call.
            arguments: as those of this layer.
            query: `(batch, heads, query_len, width)`, mapped.
            key: `(batch, key_value_heads, key_len, width)`, mapped.
            value: `(batch, key_value_heads, key_len, value_dim)`.

        Returns:
            `None` if the layer has to check its call.
        """
        try:
            if arguments != self.arguments:
                return None
        except (RuntimeError, ValueError):
            return None  # A comparison of different tensors or arrays has no truth value.
        if site.encoding.differs_in_rotation:
            if call.rotation is None:
                return None
            query = apply_rotation(query, call.rotation, cast("Any", site.encoding.rotation_before_cache).layout)
            return single_query_attention(site.module, query, key, value, None, self.arguments[2]["scaling"])
        same = self.attention is not None and site.encoding.identity == self.identity
        if same and (not self.learned or gradients_may_be_shared()):
            return cast("Attention", self.attention)(site.module, query, key, value)
        if not self.has_rows:
            return None
        rows, scale = self._rows(site, call, query, key), site.encoding.logit_scale
        factor = 1.0 if scale is None else cast("float", scale.factor_of_all)
        if self.kernel is not None:
            return self.kernel(query if factor == 1 else query * factor, key, value, rows)
        return single_query_attention(site.module, query, key, value, rows, self.arguments[2]["scaling"] * factor)

    def _rows(self, site: InterfaceAttention, call: LayerCall, query: Tensor, key: Tensor) -> Tensor:
        """`(batch or 1, heads, query_len, key_len)`: the bias, as the kernel takes it."""
        bias: Any = site.encoding.summands[0]
        known = self.rows.get(id(bias))
        if known is not None and (not known.requires_grad or gradients_may_be_shared()):
            return known
        joins = bias in site.encoding.joined and (self.places is not None or self.by_slots)
        if joins and self.kernel is not None:
            pairs = None if self.places is None else functools.partial(self._pairs, site, call, query, key)
            of_layers = site.rows_of_layers(call.state, self.kernel, self.arguments[1], pairs)
            if of_layers is not None:
                return of_layers
        kept = None
        if self.kernel is None and self.places is None and (self.by_slots or bound_of_unread(call.state) is not None):
            kept = site.kept_row(bias, call.state, key.shape[2])
        if kept is not None:
            rows = kept[0]
        elif self.places is not None:
            rows = self._rows_of_pairs(site, call, bias, query, key)
        else:
            rows = site.distance_form_of(bias, call.state, query, key, self.arguments[1], folds=False).rows()
        if site.encoding.logit_scale is not None:
            rows = rows * cast("float", site.encoding.logit_scale.factor_of_all)
        rows = for_kernel(rows, query) if self.kernel is None else self.kernel.masked(rows)
        repeats = self.places is None or not bias.reads_content
        if repeats and (not rows.requires_grad or gradients_may_be_shared()):
            self.rows[id(bias)] = rows
        return rows

    def _pairs(self, site: InterfaceAttention, call: LayerCall, query: Tensor, key: Tensor) -> AttentionPairs:
        assert self.places is not None
        slots, keys, scaling = self.places
        if site.encoding.num_features and call.key_features is None:
            site.find_features(call, query.shape[2], key.shape[2])
        inputs = (call.hidden_states, call.key_features, *site.factors_before(scaling), call.query_features)
        return AttentionPairs(query, key, slots, keys, scaling, *inputs)

    def _rows_of_pairs(
        self, site: InterfaceAttention, call: LayerCall, bias: PairwiseBias, query: Tensor, key: Tensor
    ) -> Tensor:
        replica, pairs = call.state.replica(bias), self._pairs(site, call, query, key)
        pairs.memo = self.memo if query.shape[2] == 1 else None
        if isinstance(replica, SeparableBias) and replica.separable:
            return rows_of_terms(replica.key_terms(pairs), pairs.query_slots)
        if replica.reads_content:
            return cast("Tensor", replica(pairs))
        lengths = (query.shape[2], key.shape[2])
        if bias in site.encoding.joined:
            joined: Tensor | None = call.state.together(site, "logit_bias", lambda: (pairs,), *lengths)
            if joined is not None:
                return joined
        return call.state.shared(("rows", 0), lambda: cast("Tensor", replica(pairs)), *lengths, part=bias)


def _may_compute_rows(arguments: Arguments, query: Tensor, key: Tensor, attention: Attention | None) -> bool:
    """Whether a layer of the same kind only has to compute the rows of its bias in a call with these arguments."""
    _, _, kwargs, _, _, has_gradients, autocast, dtype, *_ = arguments
    if autocast or dtype == torch.float64 or kwargs.get("scaling") is None or POSITION_BIAS in kwargs:
        return False
    if isinstance(attention, MatrixAttention):
        return query.shape[2] * key.shape[2] <= SIZES[query.is_cpu].short_pairs
    return not has_gradients and getattr(attention, "func", None) is single_query_attention
