"""Transformer-XL's relative positions."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.bias.relative_tables import (
    at_distances,
    check_whole_positions,
    clipped_rows,
    distances_of_run,
    plus,
    products_with_vectors,
    run_to_newest,
    selected_products,
    sinusoidal_products,
    sinusoidal_vectors,
    turn_frequencies,
)
from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import MOST_DISTANCES, check_base, option
from hf_posenc.schemes.weights import Layers

#: Maximum number of components that a cache keeps in each layer. For more, few operators are no advantage.
_MOST_KEPT = 2**18


class TransformerXLBias(PairwiseBias):
    """Transformer-XL's bias: learned content and position biases, and projected sinusoids of the distance."""

    reads_later_keys = False
    reads_heads = True

    def __init__(self, config: TransformerXLConfig, context: BuildContext) -> None:
        super().__init__()
        heads, hidden = (context.num_heads, context.head_dim), context.hidden_size
        if hidden % 2:
            raise ValueError(
                "transformer_xl needs vectors of hidden_size with pairs of a sine and a cosine, but hidden_size is "
                f"{hidden}, which is odd."
            )
        self.clamp_length = config.clamp_length
        # The clamped table has one row for each whole distance.
        self.whole_positions = config.clamp_length is not None
        self._frequencies = turn_frequencies(hidden, config.base)
        drawn = functools.partial(self.learned, std=context.initializer_range)
        self.content_bias = drawn("content_bias", heads)
        self.position_bias = drawn("position_bias", heads)
        self.position_projection = drawn("position_projection", (heads[0] * heads[1], hidden))

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies stock weights `(heads * head_dim, hidden + 2)`: the projection, the content and the position bias."""
        hidden = self.position_projection.shape[1]
        if native.shape != (self.position_projection.shape[0], hidden + 2):
            return False
        projection, content, position = native.split([hidden, 1, 1], dim=1)
        self.position_projection.copy_(projection)
        self.content_bias.copy_(content.view_as(self.content_bias))
        self.position_bias.copy_(position.view_as(self.position_bias))
        return True

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32.

        Raises:
            ValueError: for positions that are not integers, if distances are clamped.
        """
        if self.clamp_length is None and 2 * pairs.key.shape[-2] * self.content_bias.numel() <= _MOST_KEPT:
            run, factors = run_to_newest(pairs), (pairs.query_factor, pairs.query_scaling, pairs.key_scaling)
            if run is not None and Tensor not in map(type, factors):
                return self._for_newest(pairs, run[1], factors)
        distances = None if self.clamp_length is not None else distances_of_run(pairs)
        content, key = self.content_bias.float().unsqueeze(-2), pairs.expanded_key.float()
        # Where the layer has scaled its queries, the bias is added to scaled ones.
        query = plus(pairs.query.float(), self.position_bias.float().unsqueeze(-2), pairs.query_factor)
        if distances is not None and not isinstance(pairs.query_scaling, Tensor):
            compute = functools.partial(_vectors, distances=distances, factor=pairs.query_scaling)
            (vectors,) = pairs.keys.of_weights(self, ("vectors", pairs.query_scaling, len(distances)), compute)
            # For few keys a sum, whose gradient takes fewer operators than that of a product of matrices.
            return plus(at_distances(query @ vectors), (key * content).sum(-1).unsqueeze(-2), pairs.key_scaling)
        # (heads, head_dim, hidden): W_R of each head.
        projection = self.position_projection.float().view(*self.content_bias.shape, -1)
        if self.clamp_length is None:
            by_distance = sinusoidal_products(query @ projection, self._frequencies, pairs, mirrored=True)
        else:
            by_distance = self._by_clamped_distance(query, projection, pairs, self.clamp_length)
        return plus(by_distance, content @ key.transpose(-1, -2), pairs.key_scaling)

    def _for_newest(self, pairs: AttentionPairs, length: int, factors: tuple[Any, ...]) -> Tensor:
        """The bias of the newest token, from vectors for twice as many distances, which a cache keeps."""

        def compute() -> tuple[Tensor, ...]:
            query_factor, query_scaling, key_scaling = factors
            projection = self.position_projection.float().view(*self.content_bias.shape, -1)
            distances = torch.arange(2 * length - 1, -1, -1, device=projection.device)
            sinusoids = sinusoidal_vectors(distances, self._frequencies)
            of_queries = sinusoids @ projection.transpose(-1, -2) * query_scaling
            of_distances = self.position_bias.float().unsqueeze(-2) @ of_queries.transpose(-1, -2) * query_factor
            return self.content_bias.float().unsqueeze(-2) * key_scaling, of_queries, of_distances

        kept = pairs.keys.kept(self, factors, compute, lambda kept: kept[1].shape[1] >= length)
        of_keys, of_queries, of_distances = kept
        first = of_queries.shape[1] - length
        products = products_with_vectors(pairs, of_keys, of_queries.narrow(1, first, length))
        return products + of_distances.narrow(-1, first, length)

    def _by_clamped_distance(
        self, query: Tensor, projection: Tensor, pairs: AttentionPairs, clamp_length: int
    ) -> Tensor:
        check_whole_positions(
            pairs.keys, "transformer_xl with a clamp_length", "Use integer positions, or clamp_length=None."
        )
        rows, occurring = clipped_rows(pairs, -clamp_length, clamp_length, back=True)
        distances = torch.arange(-clamp_length, clamp_length + 1, device=query.device).narrow(0, *occurring)
        table = projection @ sinusoidal_vectors(distances, self._frequencies).transpose(0, 1)
        return selected_products(query, table, rows) * pairs.query_scaling


def _vectors(layers: Layers, distances: Tensor, factor: float) -> tuple[Tensor]:
    """`(layers, heads, head_dim, distances)` float32: the projected sinusoids of distances from keys to queries."""
    sinusoids = sinusoidal_vectors(-distances, layers[0]._frequencies).transpose(0, 1) * factor
    projections = layers.stack([layer.position_projection for layer in layers]).float()
    return (torch.unflatten(projections, 1, layers[0].content_bias.shape) @ sinusoids,)


@register_scheme
class TransformerXLConfig(SchemeConfig):
    """Multiplies queries with projected sinusoids of the distance (Transformer-XL, arXiv:1901.02860, section 3.3).

    With `scaling` the layer's own factor (`head_dim ** -0.5` in the paper) and position i of the query, j of the key,
    the terms (b), (c) and (d) of the paper's reparameterised attention; (a) is the layer's own `q_i . k_j`::

        bias(i, j) = scaling * (u . k_j + (q_i + v) . W_R R[i - j])
        R[d]       = [sin(d w_0), ..., cos(d w_0), ...],    w_m = base ** (-2 m / hidden)

    `u` (`content_bias`) and `v` (`position_bias`) are `(heads, head_dim)`, `W_R` (`position_projection`) is `(heads *
    head_dim, hidden)`. All are learned per layer. The official code shares `u` and `v` among layers unless `untie_r` is
    set; its published TensorFlow models, XLNet and the Conformers do not share them. The Conformers interleave sines
    and cosines, which only permutes the columns of `W_R`. In bidirectional models the distance keeps its sign, as in
    XLNet.

    Without a clamp, each query is projected to all `hidden` components of the sinusoids, which needs `heads` times the
    memory of the hidden states and `hidden / head_dim` times the cost of `q . k`. This works for any positions. Full
    turns are removed from every angle in float64, so that sines and cosines are accurate to 1e-6 up to a million
    tokens, and the bias of a pair does not depend on later tokens.

    Args:
        base: base of the frequencies.
        clamp_length: the distance in tokens from which on keys share one sinusoid (`clamp_len` of the official code,
            which sets it to evaluate longer sequences), at most 2**16; `None` for no limit.
    """

    name: ClassVar[str] = "transformer_xl"
    per_layer: ClassVar[bool] = True
    part_class = TransformerXLBias

    base: float = option(10000.0, check_base)
    clamp_length: int | None = option(None, minimum=1, maximum=MOST_DISTANCES)
