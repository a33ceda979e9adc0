"""What one layer has checked in a forward call, and the layers of its kind therefore need not.

Many layers compute little: those of a small model, and all layers for a single new token. Checks and decisions then
take longer than the computation. Layers of one kind have parts that differ in their weights only, so that the first of
them decides for all.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from hf_posenc.attention.backends import MatrixKernel
from hf_posenc.attention.block_attention import for_kernel
from hf_posenc.attention.forms import DistanceForm, SeparableForm
from hf_posenc.patching.call.attention_site import LayerCall
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.logit_site import kept_row
from hf_posenc.schemes.parts import SeparableBias
from hf_posenc.schemes.positions import AttentionPairs, Positions, gradients_may_be_shared

if TYPE_CHECKING:
    from hf_posenc.patching.call.interface_attention import InterfaceAttention


@dataclass(eq=False)
class CheckedLayer:
    """A layer whose call has been checked.

    The state of the forward call holds it. It holds nothing that leads back there or that belongs to one layer: such a
    cycle would keep the cache and the activations in memory until Python looks for garbage.

    Args:
        state: the state of the forward call.
        rotations: of `LayerCall`.
        arguments: what decides how attention is computed: the function, the mask, whether the module is causal, whether
            gradients are recorded, the shapes of queries and keys, their dtype, and the options of the function.
        by_slots: whether the bias follows from the distances between slots.
        places: `query_slots`, `keys` and `scaling` of `AttentionPairs`, if the bias is computed for pairs.
        matrix: computes the attention of several queries; `None` for a single one, whose bias is the mask of the
            function.
        rows: biases that several layers share, by the id of the part.
    """

    state: weakref.ref[ForwardState]
    rotations: int
    arguments: tuple[Any, ...]
    by_slots: bool
    places: tuple[Tensor, Positions, float | Tensor] | None
    matrix: MatrixKernel | None = None
    rows: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, call: LayerCall, arguments: tuple[Any, ...]) -> CheckedLayer:
        """What the call of a layer has shown."""
        pairs = call.pairs
        places = None if pairs is None else (pairs.query_slots, pairs.keys, pairs.scaling)
        return cls(weakref.ref(call.state), call.rotations, arguments, isinstance(call.form, DistanceForm), places)

    def is_like(self, call: LayerCall, arguments: tuple[Any, ...]) -> bool:
        """Whether a call of another layer of the kind differs in its numbers and weights only."""
        if call.state is not self.state() or call.rotations != self.rotations:
            return False
        try:
            return arguments == self.arguments
        except (RuntimeError, ValueError):
            return False  # Different tensors, or arrays.

    def attend(self, site: InterfaceAttention, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Any:
        """The attention of a layer that is like this one: `(output, probabilities or None)`.

        Args:
            site: the layer.
            call: its call.
            query: `(batch, heads, query_len, width)`, mapped.
            key: `(batch, key_value_heads, key_len, width)`, mapped.
            value: `(batch, key_value_heads, key_len, value_dim)`.
        """
        rows, scale = self._rows(site, call, query, key), site.encoding.logit_scale
        if scale is not None:
            query = query * cast("float", scale.factor_of_all)
        if self.matrix is not None:
            return self.matrix.attend(rows, query, key, value)
        return self.arguments[0](site.module, query, key, value, rows, **self.arguments[-1])

    def _rows(self, site: InterfaceAttention, call: LayerCall, query: Tensor, key: Tensor) -> Tensor:
        """`(batch or 1, heads, query_len, key_len)`: the bias, as the kernel takes it."""
        bias: Any = site.encoding.summands[0]
        scale = site.encoding.logit_scale
        known = self.rows.get(id(bias))
        if known is not None and (not known.requires_grad or gradients_may_be_shared()):
            return known
        if self.places is None:
            kept = kept_row(bias, call.state, key.shape[2]) if self.matrix is None and self.by_slots else None
            if kept is not None:
                rows = kept[0]
            else:
                rows = site.distance_form_of(bias, call.state, query, key, self.arguments[1], folds=False).rows()
        else:
            query_slots, keys, scaling = self.places
            own = call.state.own(bias)
            site.find_features(call, query.shape[2], key.shape[2])
            inputs = (call.hidden_states, call.key_features, *site.factors_before(scaling))
            pairs = AttentionPairs(query, key, query_slots, keys, scaling, *inputs)
            if isinstance(own, SeparableBias) and own.separable:
                rows = SeparableForm(own.key_terms(pairs), query_slots).rows()
            elif own.reads_content:
                rows = own(pairs)
            else:
                lengths = query.shape[2], key.shape[2]
                rows = call.state.shared(("rows", id(bias), 0), lambda: own(pairs), *lengths)
        if scale is not None:
            rows = rows * cast("float", scale.factor_of_all)
        rows = for_kernel(rows, query) if self.matrix is None else self.matrix.masked(rows)
        repeats = self.places is None or not bias.reads_content
        if repeats and (not rows.requires_grad or gradients_may_be_shared()):
            self.rows[id(bias)] = rows
        return rows
