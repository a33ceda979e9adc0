"""Functional interpolation for relative positions (FIRE)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias
from hf_posenc.schemes.scheme import BuildContext, SharedConfig, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_LENGTH, LARGEST_WIDTH, SMALLEST_FACTOR
from hf_posenc.schemes.weights import Layers, exporting, known_true, traced

#: The smallest value that float32 does not round away when added to a compressed distance.
_SMALLEST_EPSILON = 1e-12
#: Up to this many hidden units of all pairs, the network takes less time than its pieces in a graph and for gradients.
_FEW = 2**18


class FireBias(PairwiseBias):
    """A small network applied to the distance relative to the longest possible distance."""

    reads_later_keys = False
    reads_content = False

    def __init__(self, config: FireConfig, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.causal = context.causal
        self.length_dependent = not context.causal
        self.c = self.learned("c", 1, nn.init.constant_, val=config.initial_c)
        self.threshold_factor = self.learned("threshold_factor", 1, nn.init.ones_)
        # Like PyTorch's linear layers, the first of which has one input.
        self.hidden_weight = self.learned("hidden_weight", config.width, nn.init.uniform_, a=-1.0, b=1.0)
        self.hidden_bias = self.learned("hidden_bias", config.width, nn.init.uniform_, a=-1.0, b=1.0)
        bound, shape = 1 / math.sqrt(config.width), (context.num_heads, config.width)
        self.output_weight = self.learned("output_weight", shape, nn.init.uniform_, a=-bound, b=bound)
        self.output_bias = self.learned("output_bias", context.num_heads, nn.init.uniform_, a=-bound, b=bound)

    @property
    def threshold(self) -> Tensor:
        """`(1,)` float32: `L`, in tokens."""
        return (self.threshold_factor.float() * self.config.initial_threshold).abs()

    def normalized_distance(self, pairs: AttentionPairs) -> Tensor:
        """Returns the network's input, `(batch or 1, query_len, key_len)` float32; 0 on the diagonal."""
        farthest = (pairs.query_positions if self.causal else pairs.keys.lengths - 1).float().unsqueeze(-1)
        # A padding query has a negative position. The threshold replaces it, as for every early query.
        c, threshold = pairs.keys.kept(self, "scale", lambda: (self.c.float().abs(), self.threshold))
        if c.ndim > 1:
            # Of several layers.
            c, threshold = c[..., None, None], threshold[..., None, None]
        longest = torch.log1p(c * torch.maximum(farthest, threshold)) + self.config.epsilon
        return torch.log1p(c * pairs.steps) / longest

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        # Reading the threshold of every layer from a GPU would make the host wait.
        if type(self).normalized_distance is FireBias.normalized_distance and self.c.is_cpu:
            rows = _rows_before_threshold([self], pairs)
            if rows is not None:
                return rows[0]
        inputs = self.normalized_distance(pairs)
        units = inputs.numel() * self.config.width
        # In a graph, the pieces take more kernels. It must not depend on a number of pairs that it does not know.
        if (torch.is_grad_enabled() or traced()) and not exporting() and known_true(units <= _FEW):
            return torch.unflatten(self.network(inputs.flatten()), -1, inputs.shape).transpose(0, 1)
        pieces = pairs.keys.kept(self, "pieces", self.pieces)
        return _of_pieces(inputs, *pieces).transpose(0, 1)

    @classmethod
    def of_layers(cls, layers: Layers, pairs: AttentionPairs) -> Tensor | None:
        """The biases of several layers, `(layers, batch or 1, heads, query_len, key_len)`; `None` for many pairs."""
        if not torch.is_grad_enabled():
            return _rows_before_threshold(layers, pairs)
        if pairs.steps.numel() * layers[0].config.width > _FEW:
            return None
        whole, bound = layers.stacked(), _bound_of_distances(layers[0], pairs)
        if bound is not None and whole.c.is_cpu and bound <= float(whole.threshold.detach().min()):
            return _of_distances(whole.network(whole.inputs_before_threshold(bound)), pairs, bound)
        inputs = whole.normalized_distance(pairs)
        return torch.unflatten(whole.network(inputs.flatten(1)), -1, inputs.shape[1:]).transpose(1, 2)

    def network(self, inputs: Tensor) -> Tensor:
        """Evaluates `f` directly: `(count,)` -> `(heads, count)` float32; with an axis of layers in front, if any."""
        weight, bias = (parameter.float().unsqueeze(-1) for parameter in (self.hidden_weight, self.hidden_bias))
        hidden = torch.addcmul(bias, weight, inputs.unsqueeze(-2)).relu()
        return self.output_weight.float() @ hidden + self.output_bias.float().unsqueeze(-1)

    def inputs_before_threshold(self, count: int) -> Tensor:
        """The input of the network at the distances 0, 1, ... `(count,)`, for queries before the threshold."""
        c = self.c.float().abs()
        longest = torch.log1p(c * self.threshold) + self.config.epsilon
        return torch.log1p(c * torch.arange(count, device=c.device)) / longest

    def pieces(self) -> tuple[Tensor, Tensor]:
        """Returns the linear pieces of `f`. A network with one input and one hidden layer is piecewise linear.

        A corner is a point at which a hidden unit becomes active or inactive. Between two corners the same units are
        active, and `f` is linear. A pair therefore needs one look-up, regardless of the width.

        Returns:
            Slopes and offsets, `(2, heads, width + 1)`, and the corners between them, `(width,)` in rising order.
        """
        weight, bias = self.hidden_weight.float(), self.hidden_bias.float()
        with torch.no_grad():
            # A unit with weight 0 is constant and has no corner.
            corners, order = (-bias / weight).masked_fill(weight == 0, torch.inf).sort()
            number = torch.arange(len(corners) + 1, device=corners.device)
            beyond = order.argsort().unsqueeze(-1) < number
            acts = torch.where(beyond, (weight > 0).unsqueeze(-1), (weight < 0).unsqueeze(-1))
            acts = (acts | ((weight == 0) & (bias > 0)).unsqueeze(-1)).to(weight.dtype)
        values = self.output_weight.float() * torch.stack((weight, bias)).unsqueeze(1)
        constants = nn.functional.pad(self.output_bias.float().unsqueeze(0), (0, 0, 1, 0)).unsqueeze(-1)
        return torch.baddbmm(constants, values, acts.expand(2, -1, -1)), corners


def _rows_before_threshold(layers: Sequence[FireBias], pairs: AttentionPairs) -> Tensor | None:
    """The biases of a single query before all thresholds, `(layers, batch or 1, heads, 1, key_len)`, or `None`.

    They depend on the distance only, so a cache keeps them.
    """
    bound = _bound_of_distances(layers[0], pairs)
    if bound is None or len(pairs.query_slots) > 1 or not pairs.keys.keeps_values:
        return None

    def compute() -> tuple[Tensor, bool]:
        nearest = float(torch.cat([layer.threshold for layer in layers]).min())
        count = int(min(2.0 * bound, nearest + 1))
        of_layers = [_of_pieces(layer.inputs_before_threshold(count), *layer.pieces()) for layer in layers]
        return torch.stack(of_layers), count < 2 * bound

    values, _ = pairs.keys.kept(layers, "distances", compute, lambda known: known[1] or known[0].shape[-1] >= bound)
    return None if values.shape[-1] < bound else _of_distances(values, pairs, bound)


def _bound_of_distances(bias: FireBias, pairs: AttentionPairs) -> int | None:
    """A number that all distances are below, if those of queries before the threshold decide and are whole numbers."""
    return pairs.keys.bound() if bias.causal and not pairs.keys.ids.is_floating_point() else None


def _of_distances(values: Tensor, pairs: AttentionPairs, bound: int) -> Tensor:
    """The pairs' entries of values `(layers, heads, bound or more)`: `(layers, batch or 1, heads, query_len, key_len)`.

    Padding counts as far away.
    """
    steps = pairs.remembered("known steps", lambda: pairs.distance.abs().clamp(max=bound - 1))
    return torch.unflatten(values.index_select(-1, steps.flatten()), -1, steps.shape).transpose(1, 2)


def _of_pieces(inputs: Tensor, lines: Tensor, corners: Tensor) -> Tensor:
    """`(heads, *inputs.shape)`: the piecewise linear function of `FireBias.pieces` at some inputs."""
    piece = torch.bucketize(inputs.detach(), corners)
    # One table row for all pairs of a linear piece, with heads first.
    slope, offset = torch.unflatten(lines.index_select(2, piece.flatten()), 2, piece.shape).unbind(0)
    return torch.addcmul(offset, slope, inputs)


@register_scheme
class FireConfig(SharedConfig):
    """A learned function of progressively normalised distance (FIRE, arXiv:2310.04418, section 3).

    For the query at position `i`, the key at position `j`, and a network `f` with one hidden layer::

        bias(i, j) = f( psi(|i - j|) / (psi(max(L, m)) + epsilon) )      psi(x) = log(1 + |c| * x)
        f(x) = W2 @ relu(w1 * x + b1) + b2

        m = i             in a causal model: the longest distance this query can see
        m = length - 1    in a bidirectional model: the longest distance in the sequence

    `w1`, `b1` have shape `(width,)`, `W2` `(heads, width)` and `b2` `(heads,)`; `c` and `L` are single learned numbers,
    `L` as a factor of its initial value. The quotient is at most 1 for any sequence length, if positions have no gaps.

    The paper defines the causal form only. The encoder form keeps its properties: the quotient is at most 1 for every
    pair, reaches 1 for the longest distance in a sequence longer than `L`, and is independent of the length below `L`.
    Within a sequence it is a function of distance alone. The length is that of the real tokens, without padding.

    The implementation follows the paper's listing: positions count from 0, `|c|` and `|L|` are used, and the network is
    initialised like PyTorch's linear layers. The port in the DAPE code (arXiv:2405.14722) starts from half of its `L`.
    Every layer has its own function, as in that port. With `shared`, all layers share one function, which is the
    paper's cheaper variant (FIRE-S).

    Args:
        width: number of hidden units of the network, at most 4096.
        initial_c: the initial value of `c`.
        initial_threshold: the initial value of `L`, in tokens.
        epsilon: added to the normaliser.
        shared: one function for all layers instead of one per layer.
    """

    name: ClassVar[str] = "fire"
    part_class = FireBias

    width: int = option(32, minimum=1, maximum=LARGEST_WIDTH)
    initial_c: float = option(0.1, minimum=SMALLEST_FACTOR)
    initial_threshold: float = option(512.0, minimum=SMALLEST_FACTOR, maximum=LARGEST_LENGTH)
    epsilon: float = option(1e-6, minimum=_SMALLEST_EPSILON, maximum=1.0)
    shared: bool = option(False)
