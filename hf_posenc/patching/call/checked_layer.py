"""What one layer has checked in a forward call, and the layers of its kind therefore need not.

Many layers compute little: those of a small model, and all layers for a single new token. Checks and decisions then
take longer than the computation. Layers of one kind have parts that differ in their weights only, so that the first of
them decides for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_posenc.attention.block_attention import for_kernel
from hf_posenc.attention.by_blocks import MatrixAttention
from hf_posenc.attention.forms import SeparableForm
from hf_posenc.patching.call.attention_site import LayerCall
from hf_posenc.schemes.parts import SeparableBias
from hf_posenc.schemes.positions import AttentionPairs, gradients_may_be_shared

if TYPE_CHECKING:
    from hf_posenc.patching.call.interface_attention import InterfaceAttention


@dataclass(eq=False)
class CheckedLayer:
    """A layer whose call has been checked.

    Args:
        call: its call.
        arguments: what decides how attention is computed: the function, the mask, whether the module is causal, whether
            gradients are recorded, the shapes of queries and keys, their dtype, and the options of the function.
        matrix: the attention of several queries; `None` for a single one, whose bias is the mask of the function.
        rows: biases that several layers share, by the id of the part.
    """

    call: LayerCall
    arguments: tuple[Any, ...]
    matrix: MatrixAttention | None = None
    rows: dict[int, Tensor] = field(default_factory=dict)

    def is_like(self, call: LayerCall, arguments: tuple[Any, ...]) -> bool:
        """Whether a call of another layer of the kind differs in its numbers and weights only."""
        like = self.call
        if call.state is not like.state or call.rotations != like.rotations:
            return False
        if (call.key_features is None) != (like.key_features is None):
            return False
        try:
            return arguments == self.arguments
        except RuntimeError:
            return False  # Different tensors.

    def attend(self, site: InterfaceAttention, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Any:
        """The attention of a layer that is like this one: `(output, probabilities or None)`.

        Args:
            site: the layer.
            call: its call.
            query: `(batch, heads, query_len, width)`, mapped.
            key: `(batch, key_value_heads, key_len, width)`, mapped.
            value: `(batch, key_value_heads, key_len, value_dim)`.
        """
        rows = self._rows(site, call, query, key)
        if self.matrix is not None:
            return self.matrix.with_rows(rows, query, key, value)
        return self.arguments[0](site.module, query, key, value, rows, **self.arguments[-1])

    def _rows(self, site: InterfaceAttention, call: LayerCall, query: Tensor, key: Tensor) -> Tensor:
        """`(batch or 1, heads, query_len, key_len)`: the bias, as the kernel takes it."""
        bias: Any = site.encoding.summands[0]
        like = self.call.pairs
        known = self.rows.get(id(bias))
        if known is not None and (not known.requires_grad or gradients_may_be_shared()):
            return known
        own = call.state.own(bias)
        if like is None:
            rows = site.distance_form_of(own, call.state, query, key, self.arguments[1], folds=False).rows()
        else:
            inputs = (call.hidden_states, call.key_features, *site.factors_before(like.scaling))
            pairs = AttentionPairs(query, key, like.query_slots, like.keys, like.scaling, *inputs)
            separable = isinstance(own, SeparableBias) and own.separable
            rows = SeparableForm(own.key_terms(pairs), like.query_slots).rows() if separable else own(pairs)
        rows = for_kernel(rows, query) if self.matrix is None else self.matrix.masked(rows)
        repeats = like is None or not own.reads_content
        if repeats and (not rows.requires_grad or gradients_may_be_shared()):
            self.rows[id(bias)] = rows
        return rows
