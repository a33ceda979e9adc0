"""DeBERTa's disentangled attention."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from hf_posenc.schemes.bias.relative_tables import (
    at_distances,
    check_whole_positions,
    clipped_rows,
    distances_of_run,
    plus,
    products_of_rows,
    products_with_vectors,
    run_to_newest,
    select_rows_of_keys,
)
from hf_posenc.schemes.parts import AttentionPairs, PairwiseBias, SchemeParts
from hf_posenc.schemes.scale.constant import ConstantScale
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import LARGEST_LENGTH, MOST_DISTANCES, check_integer, option
from hf_posenc.schemes.weights import Layers

BOTH_TERMS = "c2p|p2c"


@dataclass(frozen=True)
class LogBuckets:
    """The buckets of distances, which keep their sign (DeBERTa-v2).

    Up to `buckets // 2` tokens, every distance has its own bucket. The next ones grow logarithmically, so that
    `max_distance - 1` tokens have the bucket `2 * (buckets // 2) - 1`. Farther distances have higher buckets.

    Args:
        buckets: number of buckets of one direction.
        max_distance: more than `buckets // 2 + 1`.
    """

    buckets: int
    max_distance: int
    exact: int = field(init=False)
    whole: float = field(init=False)

    def __post_init__(self) -> None:
        exact = self.buckets // 2
        # Logarithms in float32, in this order: they decide at the edge of a bucket as those of the authors do.
        whole = torch.tensor((self.max_distance - 1) / exact, dtype=torch.float32, device="cpu").log()
        vars(self).update(exact=exact, whole=float(whole))

    def __call__(self, distance: Tensor) -> Tensor:
        """Returns int64 of the same shape as `distance`, int64."""
        steps = distance.abs()
        share = (steps.clamp(min=self.exact).float() / self.exact).log() / self.whole
        grown = self.exact + (share * (self.exact - 1)).ceil().long()
        return distance.sign() * torch.where(steps <= self.exact, steps, grown)


class DisentangledBias(PairwiseBias):
    """The products of queries, and of keys, with a learned vector per distance."""

    reads_later_keys = False
    reads_heads = True
    whole_positions = True

    def __init__(self, config: DisentangledConfig, context: BuildContext) -> None:
        super().__init__()
        buckets, max_distance = config.buckets, config.max_distance
        self.buckets = None if buckets is None else LogBuckets(buckets, max_distance)
        self.span = max_distance if buckets is None else buckets
        # Vectors for earlier keys only in a causal model.
        self.first = 0 if context.causal else -self.span
        shape = (context.num_heads, self.span - self.first, context.head_dim)
        table = functools.partial(self.learned, shape=shape, std=context.initializer_range)
        self.key_weight = table("key_weight") if "c2p" in config.terms else None
        self.query_weight = table("query_weight") if "p2c" in config.terms else None

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies stock tables `(terms, heads, rows, head_dim)`, that of the keys first; rows from the latest key on."""
        weights = list(self.parameters())
        if native.shape != (len(weights), *weights[0].shape):
            return False
        for weight, table in zip(weights, native, strict=True):
            weight.copy_(table)
        return True

    def forward(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, query_len, key_len)` in float32.

        Raises:
            ValueError: for positions that are not integers.
        """
        check_whole_positions(pairs.keys, "The learned table of disentangled", "Use integer positions.")
        run = run_to_newest(pairs, self.span - 1) if self.buckets is None else None
        factors = pairs.query_scaling, pairs.key_scaling
        if run and self.key_weight is not None and self.query_weight is not None and Tensor not in map(type, factors):
            tables = pairs.keys.kept(self, ("tables", factors), functools.partial(self._from_farthest, *factors))
            return products_with_vectors(pairs, *(table.narrow(1, *run) for table in tables))
        rows, occurring = clipped_rows(pairs, self.first, self.span - 1, back=True, buckets=self.buckets)
        if Tensor not in map(type, factors) and distances_of_run(pairs) is not None:
            compute = functools.partial(_vectors, rows=rows[0], occurring=occurring, factors=factors)
            (vectors,) = pairs.keys.of_weights(self, ("vectors", factors, len(rows[0])), compute)
            # Queries and keys together need as many operators as one of them.
            terms = ((self.key_weight, pairs.query), (self.query_weight, pairs.expanded_key))
            heads = torch.stack([heads for weight, heads in terms if weight is not None]).float()
            products = [*at_distances(heads @ vectors).unbind(0)]
            if self.query_weight is not None:
                products[-1] = products[-1].transpose(-1, -2)
            return functools.reduce(torch.add, products)
        if self.query_weight is not None:
            table = self.query_weight.narrow(1, *occurring).float()
            of_keys = select_rows_of_keys(pairs.expanded_key.float(), table, rows)
        if self.key_weight is None:
            return of_keys * pairs.key_scaling
        of_queries = products_of_rows(self, pairs, self.key_weight, rows, occurring)
        return of_queries if self.query_weight is None else plus(of_queries, of_keys, pairs.key_scaling)

    def _from_farthest(self, query_scaling: Any, key_scaling: Any) -> tuple[Tensor, Tensor]:
        """The vectors of keys, and those of queries, `(heads, rows, head_dim)` float32, from the farthest key on."""
        of_keys, of_queries = cast("Tensor", self.query_weight), cast("Tensor", self.key_weight)
        return of_keys.float().flip(1) * key_scaling, of_queries.float().flip(1) * query_scaling


def _vectors(layers: Layers, rows: Tensor, occurring: tuple[int, int], factors: tuple[Any, Any]) -> tuple[Tensor]:
    """The vectors of keys for queries, then those of queries, `(layers, terms, 1, heads, head_dim, distances)` float32.

    Args:
        layers: the biases.
        rows: `(query_len, key_len)`, of `clipped_rows`.
        occurring: of `clipped_rows`.
        factors: of queries and of keys. The vectors are scaled by them.
    """
    # The last query has the distances to all earlier keys, and the first one those to all later ones.
    of_run = torch.cat((rows[-1, :-1], rows[0]))
    terms = []
    for name, run, factor in (("key_weight", of_run, factors[0]), ("query_weight", of_run.flip(0), factors[1])):
        tables = [getattr(layer, name) for layer in layers]
        if tables[0] is not None:
            parts = layers.stack([table.narrow(1, *occurring) for table in tables]).float()
            terms.append(parts.index_select(2, run).transpose(-1, -2) * factor)
    return (torch.stack(terms, dim=1).unsqueeze(2),)


@register_scheme
class DisentangledConfig(SchemeConfig):
    """Multiplies queries, and keys, with a vector per distance (DeBERTa, arXiv:2006.03654, eq. 2 to 4).

    With `s` the layer's own factor (`head_dim ** -0.5`), the query at position i and the key at position j::

        logit(i, j) = s * (q_i . k_j + q_i . K[d] + k_j . Q[d]) / sqrt(3)
        d           = clip(i - j, -max_distance, max_distance - 1) + max_distance

    The second product is "content to position" (c2p), the third is "position to content" (p2c). With one of them the
    divisor is `sqrt(2)`. DeBERTa's own factor is `(3 head_dim) ** -0.5`, so nothing more is divided there. The paper
    indexes `Q` with the distance of (j, i). The authors' code and transformers index it with that of (i, j), as here.

    `K` and `Q` are `(heads, 2 * max_distance, head_dim)`, without the first half in a causal model. Every layer has its
    own. In DeBERTa they are the products of one table of all layers with projections of each layer, which are the
    layer's own query and key projections in version 2 and 3 (`share_att_key`). `native_scheme` finds the options, and
    patching a DeBERTa with them copies these products, after which they are trained as they are. DeBERTa's dropout of
    the table is left out. If other schemes are combined with it, the divisor applies to their biases too.

    With `buckets`, which DeBERTa-v2 introduced, distances of more than `h = buckets // 2` tokens share vectors, and
    there are `2 * buckets` of them::

        d = clip(bucket(i - j), -buckets, buckets - 1) + buckets
        bucket(x) = x                                                                          for |x| <= h
                  = sign(x) * (h + ceil((h - 1) * log(|x| / h) / log((max_distance - 1) / h)))  beyond

    DeBERTa's v2 and v3 models have `buckets=256, max_distance=512`.

    Args:
        terms: "c2p|p2c", "c2p" or "p2c".
        max_distance: the distance in tokens from which on keys share one vector, at most 2**16 without buckets.
        buckets: number of vectors of one direction, at least 2 and at most 2**16; `None` for one per distance.
    """

    name: ClassVar[str] = "disentangled"
    per_layer: ClassVar[bool] = True

    terms: str = option(BOTH_TERMS, choices=(BOTH_TERMS, "c2p", "p2c"))
    max_distance: int = 512
    buckets: int | None = option(None, minimum=2, maximum=MOST_DISTANCES)

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MOST_DISTANCES if self.buckets is None else LARGEST_LENGTH
        check_integer(self, "max_distance", minimum=1, maximum=most)
        if self.buckets is not None and self.max_distance <= self.buckets // 2 + 1:
            raise ValueError(
                f"DisentangledConfig.max_distance is {self.max_distance}; expected more than {self.buckets // 2 + 1}, "
                f"because with buckets={self.buckets} the first {self.buckets // 2} distances have a bucket each and "
                "the logarithmic buckets come after them. Give a larger max_distance, or omit buckets."
            )

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias, and a logit scale unless the layer's own factor is made for as many terms."""
        bias = DisentangledBias(self, context)
        products = 1 + len(self.terms.split("|"))
        if products == context.logit_terms:
            return SchemeParts(logit_bias=bias)
        return SchemeParts(logit_bias=bias, logit_scale=ConstantScale(math.sqrt(context.logit_terms / products)))
