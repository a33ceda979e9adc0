"""Random positions from a longer range."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, cast

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.additive.binary import BinaryEncoding
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.outer_parts import SummedEncoding
from hf_posenc.schemes.parts import AdditiveEncoding, PositionMap, Positions, Reach, SchemeParts
from hf_posenc.schemes.position_maps.mapped import PositionMapConfig
from hf_posenc.schemes.scheme import BuildContext, register_scheme
from hf_posenc.schemes.validation import MOST_ROWS, option, whole_positions


class RandomizedMap(PositionMap):
    """Draws one random position for each position up to the last token's and assigns the `p`-th smallest to token `p`.

    `Positions.memo` stores the random numbers instead of the positions computed from them. So all layers and parts in
    one forward call of the model use the same draw for the same tokens, also in a layer that is recomputed for its
    gradient, and a part with other positions gets a draw that fits them.

    Args:
        max_position: upper limit (exclusive) of the drawn positions.
        real: whether real numbers are drawn instead of integers.
        always: whether positions are also drawn outside training.
    """

    whole_positions = True

    def __init__(self, max_position: int, real: bool, always: bool) -> None:
        super().__init__()
        self.max_position = max_position
        self.real = self.gives_real_positions = real
        self.always = always
        self.length_reach = Reach(
            max_position,
            f"that 'randomized' draws from. Patch with 'randomized' and max_position={2 * max_position} or more.",
        )

    @property
    def draws(self) -> bool:
        """Whether positions are currently random."""
        return self.training or self.always

    def last_position(self, last: int) -> int:
        """Returns the last position that can be drawn."""
        return self.max_position - 1

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length)`, int64 or float32.

        Raises:
            SequenceLengthError: if there are more tokens than positions to draw from.
            ValueError: for positions that are not integers.
        """
        return self._look_up(self.table(positions), positions.ids) if self.draws else positions.ids

    def renumber(self, positions: Positions) -> Positions:
        """Returns the same tokens with new positions. All axes of coordinates use the same draw."""
        if not self.draws:
            return positions
        table, coordinates = self.table(positions), positions.coordinates
        if coordinates is not None:
            coordinates = torch.stack([self._look_up(table, axis) for axis in coordinates.unbind(0)])
        ids = self._look_up(table, positions.ids)
        return dataclasses.replace(positions, ids=ids, coordinates=coordinates, extents=None, grid=None)

    def table(self, positions: Positions) -> Tensor:
        """Returns the new position of each old one, `(batch or 1, max_position)`, drawn for the last position of each
        sequence.

        Raises:
            SequenceLengthError: if there are more tokens than positions to draw from.
            ValueError: for positions that are not whole.
        """
        last = whole_positions(positions.ids, "randomized").amax(-1, keepdim=True)
        if positions.coordinates is not None:
            axes = whole_positions(positions.coordinates, "randomized")
            last = torch.maximum(last, axes.amax(dim=(0, -1)).unsqueeze(-1))
            positions.remembered("drawable", lambda: self.length_reach.check(axes), axes)
        self.length_reach.check(positions)
        # The key compares by value, so that layers with separate copies share one draw.
        name = (RandomizedMap, self.max_position, self.real, last.shape[0])
        if name not in positions.memo:
            shape, device = (last.shape[0], self.max_position), positions.ids.device
            positions.memo[name] = torch.rand(shape, dtype=torch.float32, device=device)
        noise, count = positions.memo[name].to(last.device), last + 1
        order = torch.arange(self.max_position, device=noise.device)
        # After the last token the table continues in order, beyond the range of the draw.
        beyond = self.max_position + order - count
        drawn = noise * self.max_position if self.real else noise.argsort(dim=-1)
        return drawn.where(order < count, beyond).sort(dim=-1).values

    def _look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        rows = max(table.shape[0], ids.shape[0])
        ids = ids.expand(rows, -1)
        drawn = table.expand(rows, -1).gather(1, ids.clamp(0, self.max_position - 1))
        return drawn.where(ids >= 0, ids)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises for any cache while positions are random, because every length has a new draw."""
        if self.draws:
            why = "in training mode" if self.training else "with evaluation='random'"
            remedy = "Use evaluation='identity'" if self.always else "Call model.eval()"
            raise UnsupportedError(
                f"The scheme 'randomized' {why} draws new positions in every call, so the {cached_length} cached "
                f"tokens do not fit a sequence of {total_length}. {remedy}, or pass use_cache=False."
            )


@register_scheme
class RandomizedConfig(PositionMapConfig):
    """Trains a scheme on positions drawn from a longer range (randomized positional encodings, arXiv:2305.16843).

    For a sequence of the `n` positions `0 .. n - 1`, in every forward call::

        S = n distinct integers drawn uniformly from 0 .. max_position - 1, in ascending order
        new_position of token p = S[p]

    so that the order is preserved, and the model sees the positions of much longer sequences in training. With
    `kind="float"` the `n` values are independent and uniform in `[0, max_position)` (random float sampling,
    arXiv:2602.14050). All layers share a draw, and so do queries and keys; packed documents each start at the first
    drawn value. A batch without padding shares one draw too, as in the official code. That code makes a new draw in
    each layer and, for ALiBi and relative encodings, draws distances instead of positions. The paper's text (section 3)
    draws positions once, as here.

    `learned` needs a row for every position that can be drawn: `LearnedConfig(num_positions=2048)`. Real positions
    cannot be used with schemes for integer positions (`learned`, `binary`, `t5`, `shaw`, ...), and `randomized` cannot
    be nested in another `randomized`.

    Args:
        inner: the scheme that gets the positions.
        max_position: `L`, the upper limit (exclusive) of the drawn positions and the maximum sequence length, at most
            2**20. The paper uses 2048.
        kind: "integer" or "float".
        evaluation: behaviour outside training. "identity" keeps every token's own position, and caches work; "random"
            draws as in training, as in the experiments of both papers.
    """

    name: ClassVar[str] = "randomized"

    max_position: int = option(2048, minimum=1, maximum=MOST_ROWS)
    kind: str = option("integer", choices=("integer", "float"))
    evaluation: str = option("identity", choices=("identity", "random"))

    def position_map(self) -> RandomizedMap:
        """Returns a new map."""
        return RandomizedMap(self.max_position, self.kind == "float", self.evaluation == "random")

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts of the scheme with the map.

        Raises:
            ValueError: if the scheme has no parts, cannot be built here, does not support the drawn positions, has
                fewer vectors than positions that can be drawn, or draws positions itself.
        """
        parts = super().build(context)
        for part in parts:
            if sum(isinstance(module, RandomizedMap) for module in part.modules()) > 1:
                raise ValueError(
                    f"RandomizedConfig.inner is {self.inner.name!r}, which draws positions itself. Use a single "
                    "'randomized' with the larger max_position."
                )
        if parts.additive is not None:
            self._check_vectors(cast("SummedEncoding", parts.additive).members()[0])
        return parts

    def _check_vectors(self, additive: AdditiveEncoding) -> None:
        short = next(_short_tables(additive, self.max_position - 1), None)
        if short is None:
            return
        count, last, option, enough = short
        # Maps preserve the order of positions, so a range that fits implies that every shorter range fits.
        drawable = bisect.bisect_left(
            range(1, self.max_position), True, key=lambda limit: any(_short_tables(additive, limit - 1))
        )
        moved = f", which its own map converts to values up to {last}" if last != self.max_position - 1 else ""
        fewer = f", or max_position={drawable} or less" if drawable else ""
        raise ValueError(
            f"RandomizedConfig.max_position is {self.max_position}, but {self.inner.name!r} has vectors for {count} "
            f"positions only, and every position below {self.max_position} can be drawn{moved}. Give {option}={enough} "
            f"or more{fewer}."
        )


def _short_tables(additive: AdditiveEncoding, last: int) -> Iterator[tuple[int, int, str, int]]:
    """Finds tables that have no vector for `last`, the greatest position that is passed to an additive encoding.

    Yields the number of positions in the table, the greatest position passed to it, the option that sets the number,
    and a sufficient value of that option.
    """
    if isinstance(additive, SummedEncoding):
        mapped = last if additive.position_map is None else additive.position_map.last_position(last)
        if mapped is not None:
            for part, _ in additive.terms():
                yield from _short_tables(part, mapped)
    if isinstance(additive, LearnedEncoding) and additive.extension == "error" and additive.num_positions <= last:
        yield additive.num_positions, last, "LearnedConfig.num_positions", last + 1
    if isinstance(additive, BinaryEncoding) and last.bit_length() > additive.bits:
        yield 2**additive.bits, last, "BinaryConfig.bits", last.bit_length()
