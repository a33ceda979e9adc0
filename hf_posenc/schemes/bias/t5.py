"""T5's bucketed relative bias."""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.grids import GridBias, entries_of_pairs
from hf_posenc.schemes.parts import DistanceBias, LogitBias, Positions, SchemeParts
from hf_posenc.schemes.scheme import BuildContext, SharedConfig, register_scheme
from hf_posenc.schemes.validation import MOST_DISTANCES, option, whole_positions
from hf_posenc.schemes.weights import NativeTable

#: Up to this `max_distance`, the buckets of all distances along an axis are computed, and not those of all pairs.
_LISTED = 4096


def relative_position_bucket(distance: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """T5's bucket of a distance (arXiv:1910.10683, section 2.1).

    Half of the buckets hold one distance each. The other half grow logarithmically up to `max_distance`, and the last
    one holds all larger distances. If bidirectional, keys after the query have separate buckets; otherwise they share
    bucket 0 with distance 0.

    Args:
        distance: key position minus query position, int64 of any shape.
        num_buckets: number of buckets.
        max_distance: the distance from which on all keys share one bucket.
        bidirectional: whether the two directions have separate buckets.

    Returns:
        int64 of the same shape, in `[0, num_buckets)`.
    """
    if bidirectional:
        num_buckets //= 2
        first = (distance > 0).long() * num_buckets
        steps = distance.abs()
    else:
        first = torch.zeros_like(distance)
        steps = (-distance).clamp(min=0)
    exact = num_buckets // 2
    # float32 and this order of operations are needed for distances at the edge of a bucket to match T5.
    growth = torch.log(steps.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    logarithmic = (exact + growth.long()).clamp(max=num_buckets - 1)
    return first + torch.where(steps < exact, steps, logarithmic)


class T5Buckets(LogitBias):
    """One trainable number per axis, bucket and head."""

    whole_positions = True

    def __init__(self, config: T5Config, context: BuildContext) -> None:
        super().__init__()
        self.axes = config.axes
        self.num_buckets = config.num_buckets
        self.max_distance = config.max_distance
        self.bidirectional = config.has_two_directions(context)
        axes = () if config.axes == 1 else (config.axes,)
        shape = (*axes, config.num_buckets, context.num_heads)
        self.initializer_range = config.deviation(context)
        self.weight = self.learned("weight", shape, std=self.initializer_range)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of every distance, int64 of the same shape."""
        return relative_position_bucket(distance, self.num_buckets, self.max_distance, self.bidirectional)


class T5Bias(NativeTable, T5Buckets, DistanceBias):
    """The number of the distance in the order of tokens."""

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32.

        Raises:
            ValueError: for distances that are not integers.
        """
        whole_positions(distance, "t5")
        return nn.functional.embedding(self.bucket(distance), self.weight).movedim(-1, 0).float()


class GridT5Bias(T5Buckets, GridBias):
    """The sum of the numbers of the distances along the axes of a grid."""

    scheme = "t5"

    def of_distances(self, distances: Tensor, keys: Positions) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        return functools.reduce(torch.add, map(self._of_axis, distances, self.weight))

    def _of_axis(self, distance: Tensor, table: Tensor) -> Tensor:
        """`(batch or 1, heads, query_len, key_len)` float32 of the distances along one axis."""
        farthest = self.max_distance
        if farthest > _LISTED:
            return entries_of_pairs(table.float(), self.bucket(distance))
        # A row for each distance: fewer than pairs, and all that are farther have the bucket of the farthest.
        each = torch.arange(-farthest, farthest + 1, device=distance.device)
        return entries_of_pairs(table[self.bucket(each)].float(), distance.clamp(-farthest, farthest) + farthest)


@register_scheme
class T5Config(SharedConfig):
    """A learned bias per bucket of distances, added to the attention logits (arXiv:1910.10683, section 2.1).

    For query i and key j of head h, with n buckets for a direction and a table `W` of `(num_buckets, heads)`::

        bias(i, j) = W[bucket(|j - i|), h]
        bucket(x)  = x                                                               for x < n / 2
                   = n / 2 + floor(log(2x / n) / log(2 * max_distance / n) * n / 2)  up to n - 1, beyond

    A causal model uses all buckets for the past; a bidirectional model uses half of them for later keys. T5 itself does
    not divide its logits by `sqrt(head_dim)`; patched models keep the factor of their architecture. New entries have
    the standard deviation of the model's own weights; T5 uses a larger one, see `initialization`.

    With two or three `axes`, the bias of two patches is the sum of one table for each axis, with buckets of the
    distance along it in both directions (the spatial bias of LayoutLMv2 and v3, arXiv:2012.14740)::

        bias(i, j) = W[0, bucket(row_j - row_i), h] + W[1, bucket(column_j - column_i), h]

    The bias of a token without a place (a class or register token) and any other is 0.

    Args:
        num_buckets: number of buckets, at most 2**16; must be even if directions have separate buckets.
        max_distance: the distance in tokens from which on all keys share one bucket.
        bidirectional: whether keys before and after the query have different buckets. `None` follows the model; `False`
            is not possible in a bidirectional model.
        shared: whether all layers share one table, as in T5; with `False` every layer has its own, as in UMT5.
        initialization: standard deviation of a new table: "model" takes the `initializer_range` of the model's config,
            "t5" takes `hidden_size ** -0.5` as T5 does (0.04 to 0.09 for hidden sizes of 512 and 128).
        axes: 1 for the order of the tokens, 2 for (row, column), 3 for (frame, row, column) of the model. Several axes
            are bidirectional in every model.
    """

    name: ClassVar[str] = "t5"

    num_buckets: int = option(32, minimum=2, maximum=MOST_DISTANCES)
    max_distance: int = option(128, minimum=2)
    bidirectional: bool | None = option(None, optional=True)
    shared: bool = option(True)
    initialization: str = option("model", choices=("model", "t5"))
    axes: int = option(1, minimum=1, maximum=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes > 1 and self.bidirectional is False:
            raise ValueError(
                f"T5Config.bidirectional is False, but on {self.axes} axes no token is earlier than another. Leave it "
                "out, or use axes=1."
            )
        if self.axes > 1 or self.bidirectional is not None:
            self._check_buckets(self.axes > 1 or self.bidirectional is True)

    @property
    def part_class(self) -> type[T5Buckets]:  # type: ignore[override]
        """The table of distances in the order of tokens, or on a grid."""
        return T5Bias if self.axes == 1 else GridT5Bias

    def has_two_directions(self, context: BuildContext) -> bool:
        """Whether keys after the query have their own buckets. On several axes no token is earlier than another."""
        return self.axes > 1 or (not context.causal if self.bidirectional is None else self.bidirectional)

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias.

        Raises:
            UnsupportedError: if a bidirectional model gets buckets for earlier keys only.
            ValueError: if the numbers of buckets and distances do not fit the directions of this model.
        """
        if self.bidirectional is False and not context.causal:
            raise UnsupportedError(
                "T5Config.bidirectional is False, which puts all later keys into the bucket of distance 0, but this "
                "model is bidirectional and attends to them. Omit it, or give True."
            )
        self._check_buckets(self.has_two_directions(context))
        return super().build(context)

    def deviation(self, context: BuildContext) -> float:
        """Returns the standard deviation of a new table."""
        return context.hidden_size**-0.5 if self.initialization == "t5" else context.initializer_range

    def _check_buckets(self, bidirectional: bool) -> None:
        if bidirectional and (self.num_buckets % 2 or self.num_buckets < 4):
            raise ValueError(
                f"T5Config.num_buckets is {self.num_buckets}; expected an even number of at least 4, because half of "
                "the buckets belong to each direction of a bidirectional bias."
            )
        exact = self.num_buckets // (4 if bidirectional else 2)
        if self.max_distance <= exact:
            raise ValueError(
                f"T5Config.max_distance is {self.max_distance}; expected more than {exact}, because with "
                f"num_buckets={self.num_buckets} the first {exact} distances have a bucket each and the logarithmic "
                "buckets come after them."
            )
