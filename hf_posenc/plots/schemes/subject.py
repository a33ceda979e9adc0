"""What a figure draws: a scheme at a standard place, with inputs that are the same on every machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.metrics.properties.specimen import build_parts
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.positions import Positions, integer_range

#: The seed of fresh parameters.
PARAMETER_SEED = 0
#: The seed of queries, keys, hidden states and token embeddings. Another one, because equal streams of random numbers
#: would make queries equal to rows of a learned table.
INPUT_SEED = 1
#: Standard deviation that a learned vector is drawn with where it starts at or near zero. A matrix of `n` columns
#: is drawn with `1 / sqrt(n)`, so that its products with a vector of independent unit components vary by about 1.
VECTOR_STD = 0.5
#: A learned parameter whose root mean square is below this counts as near zero.
TINY = 0.05
#: The token that ends a segment, for schemes that read token ids: every 16th one of a figure's sequence.
SEGMENT_LENGTH = 16

_PLACE = BuildContext(hidden_size=128, num_heads=8, head_dim=64, max_positions=512, num_key_value_heads=8)


@dataclass(frozen=True)
class Subject:
    """A scheme as the figures see it.

    Args:
        config: the scheme.
        context: the place it was built at.
        parts: its parts, in evaluation mode; none for an arrangement of layers.
        enlarged: names of the learned parameters that start at or near zero and were drawn larger.
    """

    config: SchemeConfig
    context: BuildContext
    parts: SchemeParts
    enlarged: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name with the options that differ from their defaults, and whether parameters were drawn larger."""
        label = scheme_label(self.config)
        if not self.enlarged:
            return shortened(label, 75)
        return shortened(label, 45) + ", with random untrained values"

    @property
    def place_note(self) -> str:
        """A sentence on the place for captions, or an empty text at the first of the standard places."""
        usual = standard_places()[0]
        if self.context == usual:
            return ""
        direction = "causal" if self.context.causal else "bidirectional"
        return f"Drawn in a {direction} model with heads of {self.context.head_dim} dimensions."

    @property
    def note(self) -> str:
        """A sentence on learned parameters for captions, or an empty text."""
        if self.enlarged:
            names = ", ".join(f"`{name}`" for name in self.enlarged)
            return (
                f"The learned values are random (seed {PARAMETER_SEED}); training replaces them. Those that start near "
                f"zero were drawn larger, to show something: {names}."
            )
        if any(True for part in self.parts for _ in part.parameters()):
            return f"The learned values are those before any training (seed {PARAMETER_SEED})."
        return ""

    def positions(self, length: int, step: int = 1) -> Positions:
        """`length` positions from 0, `step` apart, of one sequence whose segments end at every 16th token."""
        ids = integer_range(0, length) * step
        token_ids = ((ids + 1) % SEGMENT_LENGTH).clamp(min=0)
        return Positions(ids, torch.tensor([[length]]), token_ids=token_ids)

    def random_heads(self, length: int, samples: int = 1, seed: int = INPUT_SEED) -> tuple[Tensor, Tensor, Tensor]:
        """Independent standard normal queries, keys and hidden states.

        Returns:
            `(samples, heads, length, head_dim)` twice, and `(samples, length, hidden)`.
        """
        generator = torch.Generator().manual_seed(seed)
        heads, width = self.context.num_heads, self.context.head_dim
        query, key = (torch.randn(samples, heads, length, width, generator=generator) for _ in range(2))
        return query, key, torch.randn(samples, length, self.context.hidden_size, generator=generator)


def subject_of(config: SchemeConfig, context: BuildContext | None = None) -> Subject:
    """Builds a scheme for its figures.

    Args:
        config: any scheme, an arrangement included.
        context: the place; by default 8 heads of 64 dimensions, a hidden size of 128 and 512 positions in a causal
            model, or the first of a few variations of it (heads of 128 dimensions, a bidirectional model) at which the
            scheme can be built.

    Raises:
        ValueError: if the scheme can be built at none of these places, with the reason given by the first.
    """
    if isinstance(config, LayeredConfig):
        return Subject(config, context or _PLACE, SchemeParts(), ())
    first_refusal: ValueError | None = None
    for place in standard_places() if context is None else (context,):
        try:
            return _built(config, place)
        except ValueError as refusal:
            first_refusal = first_refusal or refusal
    assert first_refusal is not None
    raise first_refusal


def standard_places(base: BuildContext = _PLACE) -> tuple[BuildContext, ...]:
    """The place of figures or of counts, followed by its variations for schemes that ask for them."""
    wide = dataclasses.replace(base, head_dim=128)
    return (base, wide, dataclasses.replace(base, causal=False), dataclasses.replace(wide, causal=False))


def shortened(text: str, width: int) -> str:
    """`text`, cut where it is longer than `width` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


@torch.no_grad()
def _built(config: SchemeConfig, context: BuildContext) -> Subject:
    parts, other = (build_parts(config, context, seed) for seed in (PARAMETER_SEED, PARAMETER_SEED + 1))
    generator = torch.Generator().manual_seed(PARAMETER_SEED)
    enlarged: list[str] = []
    for part, twin in zip(parts, other, strict=True):
        for (name, parameter), fresh in zip(part.named_parameters(), twin.parameters(), strict=True):
            # What two seeds agree on, and is not zero, is a chosen value and stays.
            small = not torch.equal(parameter, fresh) and float(parameter.float().square().mean().sqrt()) < TINY
            if not parameter.any() or small:
                std = VECTOR_STD if parameter.ndim < 2 else float(parameter.shape[-1] ** -0.5)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                enlarged.append(name)
    return Subject(config, context, parts, tuple(dict.fromkeys(enlarged)))
