"""Positions drawn at random from a longer range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.position_maps.mapped import PositionMap, PositionMapConfig
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_choice, check_integer, check_positions_below, whole_positions


class RandomizedMap(PositionMap):
    """Token `p` gets the `p`-th smallest of as many random positions as its sequence has tokens.

    The draw is kept in `Positions.memo`, so that all layers and all parts of one forward call of the model see the
    same one, and a layer that is recomputed for its gradient sees it again.

    Args:
        max_position: positions are drawn below it.
        real: whether real numbers are drawn instead of whole ones.
        always: whether positions are drawn outside training too.
    """

    def __init__(self, max_position: int, real: bool, always: bool) -> None:
        super().__init__()
        self.max_position = max_position
        self.real = real
        self.always = always

    @property
    def draws(self) -> bool:
        """Whether positions are random now."""
        return self.training or self.always

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length)`, int64 or float32.

        Raises:
            SequenceLengthError: if there are more tokens than positions to draw from.
            ValueError: for positions that are not whole.
        """
        if not self.draws:
            return positions.ids
        check_positions_below(
            whole_positions(positions.ids, "randomized"),
            self.max_position,
            f"that 'randomized' draws from. Patch with 'randomized' and max_position={2 * self.max_position} or more.",
        )
        # By value, so that layers with copies of their own share one draw.
        name = (RandomizedMap, self.max_position, self.real)
        if name not in positions.memo:
            positions.memo[name] = self.table(positions)
        table: Tensor = positions.memo[name]
        rows = max(table.shape[0], positions.ids.shape[0])
        ids = positions.ids.expand(rows, -1)
        drawn = table.expand(rows, -1).gather(1, ids.clamp(0, self.max_position - 1))
        return drawn.where(ids >= 0, ids)

    def table(self, positions: Positions) -> Tensor:
        """`(batch or 1, max_position)`: the new position of each old one, drawn for the length of each sequence."""
        count = torch.maximum(positions.lengths, positions.ids.amax(-1, keepdim=True) + 1)
        noise = torch.rand(count.shape[0], self.max_position, dtype=torch.float32, device=positions.ids.device)
        order = torch.arange(self.max_position, device=noise.device)
        # Past the tokens the table goes on in order, beyond what can be drawn.
        beyond = self.max_position + order - count
        drawn = noise * self.max_position if self.real else noise.argsort(dim=-1)
        return drawn.where(order < count, beyond).sort(dim=-1).values

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

    For a sequence of `n` tokens, in every forward call::

        S = n distinct integers drawn uniformly from 0 .. max_position - 1, in ascending order
        new_position of token p = S[p]

    so that order is kept, and positions of sequences much longer than those in training have all been seen. With
    `kind="float"` the `n` values are independent and uniform in `[0, max_position)` (random float sampling,
    arXiv:2602.14050). All layers share a draw, and so do queries and keys; packed documents each start at the first
    drawn value. A batch without padding shares one draw too, as in the official code. That code draws anew in each
    layer and, for ALiBi and relative encodings, draws the distances instead of the positions; the paper's text
    (section 3) draws positions once, which is followed here.

    `learned` needs a row for every position that can be drawn: `LearnedConfig(num_positions=2048)`. Real positions
    do not go with schemes of whole numbers (`learned`, `binary`, `t5`).

    Args:
        inner: the scheme that gets the positions.
        max_position: `L`, positions are drawn below it; the longest sequence to be met. The paper's is 2048.
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
        check_integer(self, "max_position", minimum=1)
        check_choice(self, "kind", ("integer", "float"))
        check_choice(self, "evaluation", ("identity", "random"))

    def position_map(self) -> RandomizedMap:
        """A new map."""
        return RandomizedMap(self.max_position, self.kind == "float", self.evaluation == "random")
