"""Two positions per token: the position of its segment, and its position within the segment."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.additive.sinusoidal import SinusoidalConfig
from hf_posenc.schemes.arrangement.schedule import nested_scheme
from hf_posenc.schemes.parts import PositionMap, Positions, SchemeParts
from hf_posenc.schemes.position_maps.mapped import map_parts
from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.scheme import BuildContext, OuterConfig, SchemeConfig, option, register_scheme

#: The cost of a forward grows with the number of separators.
_MOST_SEPARATORS = 256


class _Segments(PositionMap):
    """Base class of segments. A token gets the position of its segment, or with `within` its own in the segment."""

    def __init__(self, config: HierarchicalConfig, within: bool) -> None:
        super().__init__()
        self.length = config.segment_length
        self.separators = config.separators
        self.within = within
        #: The last position within a segment; later tokens share it.
        self.last = config.max_segment_length - 1


class FixedSegments(_Segments):
    """Segments of equal length."""

    def last_position(self, last: int) -> int:
        """Returns the last position within a segment, or the position of the segment that contains `last`."""
        return min(last, self.length - 1, self.last) if self.within else last // self.length

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length)` in the dtype of the positions."""
        ids = positions.ids
        if self.within:
            return (ids % self.length).clamp(max=self.last).where(ids >= 0, ids)
        return torch.div(ids, self.length, rounding_mode="floor")


class SeparatedSegments(_Segments):
    """Segments that end with a separator token; a sequence, or a packed document, starts a new count.

    A document starts at position 0, or where positions decrease. Equal positions do not start a document, because a
    caller or a clamp may assign them to adjacent tokens.
    """

    needs_whole_sequence = True
    reads_positions = False
    finds_documents = True

    def last_position(self, last: int) -> int:
        """Returns `last`: one segment may contain all tokens, or every token may end a segment."""
        return min(last, self.last) if self.within else last

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch, length)` int64.

        Raises:
            UnsupportedError: if the vocabulary ids of the tokens are not known.
        """
        ids, tokens = positions.ids, positions.token_ids
        if tokens is None or tokens.shape[-1] != ids.shape[-1]:
            raise UnsupportedError(
                "HierarchicalConfig.separators splits the text at certain tokens, but this call does not have the "
                "vocabulary ids of all tokens. Pass input_ids instead of inputs_embeds and use_cache=False, or use "
                "segment_length=."
            )
        ids = ids.expand(tokens.shape[0], -1)
        real = ids >= 0
        is_separator = torch.zeros_like(tokens, dtype=torch.bool)
        for separator in self.separators:
            is_separator = is_separator | (tokens == separator)
        is_separator = is_separator & real
        slots = torch.arange(real.shape[-1], device=real.device).expand_as(real)
        latest = slots.where(real, -1).cummax(-1).values
        # The slot of the last real token before each token, or -1.
        previous = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
        restart = real & ((previous < 0) | (ids == 0) | (ids < ids.gather(-1, previous.clamp(min=0))))
        if self.within:
            rank = real.long().cumsum(-1)
            starts = restart | is_separator.gather(-1, previous.clamp(min=0))
            since = rank - rank.where(starts, 0).cummax(-1).values
            return since.clamp(max=self.last).where(real, -1)
        before = is_separator.long().cumsum(-1) - is_separator.long()
        return (before - before.where(restart, 0).cummax(-1).values).where(real, -1)

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Raises for any cache, because its number of separators is not known."""
        raise UnsupportedError(
            f"HierarchicalConfig.separators counts the separators before each token, and those among the "
            f"{cached_length} cached tokens are no longer known. Pass the whole sequence of {total_length} with "
            "use_cache=False, or use segment_length=."
        )


@register_scheme
class HierarchicalConfig(OuterConfig):
    """Encodes the position within a segment and the position of the segment separately (BiPE, arXiv:2401.16421).

    Segments have `segment_length` tokens, or end with a separator token::

        segment(p) = number of segments that ended before p
        within(p)  = p - first position of the segment of p

        x_p     += within scheme at min(within(p), max_segment_length - 1)
        logit_ij = segment scheme at positions segment(i), segment(j)

    Tokens of one segment have distance 0 for the segment scheme, and only the additive scheme distinguishes them. The
    default is BiPE-RoPE except for the additive part, which is learned in the official code: `within="learned"`.
    BiPE-ALiBi multiplies ALiBi's slopes by 96 in that code: `segment=PositionScaleConfig("alibi", factor=96)`. The code
    ends segments at the full stop and the line break; the separator belongs to the segment it ends.

    Args:
        within: an additive scheme: a config, a name, or the dictionary of a config.
        segment: the scheme for the positions of segments; it must map queries and keys or add to logits.
        segment_length: length of a segment in tokens, instead of `separators`. There is no published value; 64 is about
            two sentences.
        separators: vocabulary ids of the tokens that end a segment, at most 256. A cache cannot be extended with them.
            Empty for segments of equal length.
        max_segment_length: number of distinct positions within a segment, 1024 in the official code.
    """

    name: ClassVar[str] = "hierarchical"

    within: SchemeConfig = option(SinusoidalConfig, nested_scheme)
    segment: SchemeConfig = option(RopeConfig, nested_scheme)
    segment_length: int = option(64, minimum=1)
    separators: tuple[int, ...] = option((), minimum=0, most=_MOST_SEPARATORS)
    max_segment_length: int = option(1024, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separators and self.segment_length != type(self).segment_length:
            raise ValueError(
                f"HierarchicalConfig has both separators={self.separators} and segment_length={self.segment_length}, "
                "which both define where segments end; give only one."
            )

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds both schemes, each with its own position map.

        Raises:
            ValueError: if `within` is not additive, or if `segment` is additive or depends on the order of tokens.
        """
        within, segment = self.within.build(context), self.segment.build(context)
        if within.additive is None or len(list(within)) > 1:
            raise ValueError(
                f"HierarchicalConfig.within is {self.within.name!r}; expected a scheme that only adds to embeddings, "
                "such as 'sinusoidal' or 'learned'."
            )
        if segment.additive is not None or not list(segment):
            raise ValueError(
                f"HierarchicalConfig.segment is {self.segment.name!r}; expected a scheme that acts in attention only, "
                "such as 'rope' or 'alibi'."
            )
        segments = SeparatedSegments if self.separators else FixedSegments
        parts = map_parts(segments(self, within=False), segment, "HierarchicalConfig.segment", self.segment)
        mapped = map_parts(segments(self, within=True), within, "HierarchicalConfig.within", self.within)
        parts.additive = mapped.additive
        return parts
