"""Positions drawn at random from a longer range."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.additive.binary import BinaryEncoding
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.arrangement.composed import SummedEncoding
from hf_posenc.schemes.config import BuildContext
from hf_posenc.schemes.limits import MOST_ROWS
from hf_posenc.schemes.parts import AdditiveEncoding, SchemeParts
from hf_posenc.schemes.position_maps.mapped import MappedEncoding, PositionMap, PositionMapConfig
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.reach import Reach
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_choice, check_integer, whole_positions


class RandomizedMap(PositionMap):
    """Token `p` gets the `p`-th smallest of as many random positions as there are up to the last token's.

    Kept in `Positions.memo` are the random numbers rather than the positions made of them: all layers and all parts of
    one forward call of the model draw the same for the same tokens, a layer that is recomputed for its gradient too,
    and a part that is given other positions gets a draw that fits those.

    Args:
        max_position: positions are drawn below it.
        real: whether real numbers are drawn instead of whole ones.
        always: whether positions are drawn outside training too.
    """

    whole_positions = True

    def __init__(self, max_position: int, real: bool, always: bool) -> None:
        super().__init__()
        self.max_position = max_position
        self.real = real
        self.always = always
        self.length_reach = Reach(
            max_position,
            f"that 'randomized' draws from. Patch with 'randomized' and max_position={2 * max_position} or more.",
        )

    @property
    def draws(self) -> bool:
        """Whether positions are random now."""
        return self.training or self.always

    @property
    def gives_real_positions(self) -> bool:
        """Whether real numbers are drawn, now or in training."""
        return self.real

    def last_position(self, last: int) -> int:
        """The last one that can be drawn."""
        return self.max_position - 1

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length)`, int64 or float32.

        Raises:
            SequenceLengthError: if there are more tokens than positions to draw from.
            ValueError: for positions that are not whole.
        """
        return self._look_up(self.table(positions), positions.ids) if self.draws else positions.ids

    def renumber(self, positions: Positions) -> Positions:
        """The same tokens at their new positions; all axes of coordinates share the draw of the positions."""
        if not self.draws:
            return positions
        table, coordinates = self.table(positions), positions.coordinates
        if coordinates is not None:
            coordinates = torch.stack([self._look_up(table, axis) for axis in coordinates.unbind(0)])
        return dataclasses.replace(positions, ids=self._look_up(table, positions.ids), coordinates=coordinates)

    def table(self, positions: Positions) -> Tensor:
        """`(batch or 1, max_position)`: the new position of each old one, drawn for the last one of each sequence.

        Raises:
            SequenceLengthError: if there are more tokens than positions to draw from.
            ValueError: for positions that are not whole.
        """
        last = whole_positions(positions.ids, "randomized").amax(-1, keepdim=True)
        if positions.coordinates is not None:
            axes = whole_positions(positions.coordinates, "randomized")
            last = torch.maximum(last, axes.amax(dim=(0, -1)).unsqueeze(-1))
        self.length_reach.check(last)
        # By value, so that layers with copies of their own share one draw.
        name = (RandomizedMap, self.max_position, self.real, last.shape[0])
        if name not in positions.memo:
            positions.memo[name] = torch.rand(
                last.shape[0], self.max_position, dtype=torch.float32, device=positions.ids.device
            )
        noise, count = positions.memo[name].to(last.device), last + 1
        order = torch.arange(self.max_position, device=noise.device)
        # Past the tokens the table goes on in order, beyond what can be drawn.
        beyond = self.max_position + order - count
        drawn = noise * self.max_position if self.real else noise.argsort(dim=-1)
        return drawn.where(order < count, beyond).sort(dim=-1).values

    def _look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        rows = max(table.shape[0], ids.shape[0])
        ids = ids.expand(rows, -1)
        drawn = table.expand(rows, -1).gather(1, ids.clamp(0, self.max_position - 1))
        return drawn.where(ids >= 0, ids)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses to extend any cache while positions are random: every length is a new draw."""
        if self.draws:
            why = "in training mode" if self.training else "with evaluation='random'"
            remedy = "Use evaluation='identity'" if self.always else "Call model.eval()"
            raise UnsupportedError(
                f"The scheme 'randomized' {why} draws new positions in every call, so the {cached_length} cached "
                f"tokens do not fit a sequence of {total_length}. {remedy}, or pass use_cache=False."
            )


@register_scheme
@dataclass(frozen=True)
class RandomizedConfig(PositionMapConfig):
    """Trains a scheme on positions drawn from a longer range (randomized positional encodings, arXiv:2305.16843).

    For a sequence of the `n` positions `0 .. n - 1`, in every forward call::

        S = n distinct integers drawn uniformly from 0 .. max_position - 1, in ascending order
        new_position of token p = S[p]

    so that order is kept, and positions of sequences much longer than those in training have all been seen. With
    `kind="float"` the `n` values are independent and uniform in `[0, max_position)` (random float sampling,
    arXiv:2602.14050). All layers share a draw, and so do queries and keys; packed documents each start at the first
    drawn value. A batch without padding shares one draw too, as in the official code. That code draws anew in each
    layer and, for ALiBi and relative encodings, draws the distances instead of the positions; the paper's text
    (section 3) draws positions once, which is followed here.

    `learned` needs a row for every position that can be drawn: `LearnedConfig(num_positions=2048)`. Real positions
    do not go with schemes of whole numbers (`learned`, `binary`, `t5`, `shaw`, ...), and a draw does not go with
    another draw.

    Args:
        inner: the scheme that gets the positions.
        max_position: `L`, positions are drawn below it; the longest sequence to be met, at most 2**20. The paper's is
            2048.
        kind: "integer" or "float".
        evaluation: outside training, "identity" gives every token its own position, and caches work; "random" draws
            as in training, as both papers' experiments do.
    """

    name: ClassVar[str] = "randomized"

    max_position: int = 2048
    kind: str = "integer"
    evaluation: str = "identity"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "max_position", minimum=1, maximum=MOST_ROWS)
        check_choice(self, "kind", ("integer", "float"))
        check_choice(self, "evaluation", ("identity", "random"))

    def position_map(self) -> RandomizedMap:
        """A new map."""
        return RandomizedMap(self.max_position, self.kind == "float", self.evaluation == "random")

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts of the scheme under the map.

        Raises:
            ValueError: if the scheme has no parts, cannot be built here, does not go with the positions drawn, has
                vectors for fewer of them than can be drawn, or draws positions itself.
        """
        parts = super().build(context)
        for part in parts:
            if sum(isinstance(module, RandomizedMap) for module in part.modules()) > 1:
                raise ValueError(
                    f"RandomizedConfig.inner is {self.inner.name!r}, which draws positions itself. A draw out of drawn "
                    "positions is one draw; use one 'randomized', with the larger max_position."
                )
        if parts.additive is not None:
            self._check_vectors(cast("MappedEncoding", parts.additive).inner)
        return parts

    def _check_vectors(self, additive: AdditiveEncoding) -> None:
        short = next(_short_tables(additive, self.max_position - 1), None)
        if short is None:
            return
        count, last, option, enough = short
        # Maps keep the order of positions, so that what fits for a range fits for every shorter one.
        drawable = bisect.bisect_left(
            range(1, self.max_position), True, key=lambda limit: any(_short_tables(additive, limit - 1))
        )
        moved = f", which its own map turns into up to {last}" if last != self.max_position - 1 else ""
        fewer = f", or max_position={drawable} or less" if drawable else ""
        raise ValueError(
            f"RandomizedConfig.max_position is {self.max_position}, but {self.inner.name!r} has vectors for {count} "
            f"positions only, and every position below {self.max_position} can be drawn{moved}. Give {option}={enough} "
            f"or more{fewer}."
        )


def _short_tables(additive: AdditiveEncoding, last: int) -> Iterator[tuple[int, int, str, int]]:
    """What has no vector for the greatest position.

    Args:
        additive: an encoding.
        last: the greatest position that it is given.

    Yields:
        For how many positions a table has vectors, the greatest one it is given, the option that says how many, and
        a value of it that fits.
    """
    if isinstance(additive, SummedEncoding):
        for part in additive.parts:
            yield from _short_tables(cast("AdditiveEncoding", part), last)
    if isinstance(additive, MappedEncoding):
        mapped = additive.position_map.last_position(last)
        if mapped is not None:
            yield from _short_tables(additive.inner, mapped)
    if isinstance(additive, LearnedEncoding) and additive.extension == "error" and additive.num_positions <= last:
        yield additive.num_positions, last, "LearnedConfig.num_positions", last + 1
    if isinstance(additive, BinaryEncoding) and last.bit_length() > additive.bits:
        yield 2**additive.bits, last, "BinaryConfig.bits", last.bit_length()
