"""The subject of a figure: a scheme built at a standard place, and values measured on its parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.metrics.properties.specimen import build_parts
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.logits import attention_pairs, pairwise_bias, positional_logits
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.positions import Positions, integer_range

#: The seed of fresh parameters.
PARAMETER_SEED = 0
#: The seed of queries, keys, hidden states and token embeddings. It is not the seed above, because with the same random
#: numbers, queries would be equal to rows of a learned table.
INPUT_SEED = 1
#: Standard deviation of the random values that replace a learned vector at or near zero. A matrix with `n` columns gets
#: `1 / sqrt(n)`, so that its product with a standard normal vector has a standard deviation of about 1.
VECTOR_STD = 0.5
#: A learned parameter whose root mean square is below this counts as near zero.
TINY = 0.05
#: Length of a segment, for schemes that read token ids: every 16th token of a figure's sequence ends a segment.
SEGMENT_LENGTH = 16

_PLACE = BuildContext(hidden_size=128, num_heads=8, head_dim=64, max_positions=512, num_key_value_heads=8)


@dataclass(frozen=True)
class Subject:
    """A scheme that figures are drawn of.

    Args:
        config: the scheme.
        context: the place where it was built.
        parts: its parts, in evaluation mode; none for an arrangement of layers.
        enlarged: names of the learned parameters at or near zero that were replaced by larger random values.
    """

    config: SchemeConfig
    context: BuildContext
    parts: SchemeParts
    enlarged: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name with the options that differ from their defaults, and whether parameters were enlarged."""
        label = self.config.label
        if not self.enlarged:
            return shortened(label, 75)
        return shortened(label, 45) + ", with random untrained values"

    @property
    def place_note(self) -> str:
        """A sentence about the place for captions; empty for the first of the standard places."""
        usual = standard_places()[0]
        if self.context == usual:
            return ""
        direction = "causal" if self.context.causal else "bidirectional"
        return f"Drawn in a {direction} model with heads of {self.context.head_dim} dimensions."

    @property
    def note(self) -> str:
        """A sentence about learned parameters for captions; empty if there are none."""
        if self.enlarged:
            names = ", ".join(f"`{name}`" for name in self.enlarged)
            return (
                f"The learned values are random (seed {PARAMETER_SEED}); training replaces them. Values that "
                f"start near zero were drawn larger, so that the figure shows an effect: {names}."
            )
        if any(True for part in self.parts for _ in part.parameters()):
            return f"The learned values are those before any training (seed {PARAMETER_SEED})."
        return ""

    def positions(self, length: int, step: int = 1) -> Positions:
        """Returns `length` positions of one sequence, from 0 in steps of `step`. A segment ends at every 16th token."""
        ids = integer_range(0, length) * step
        token_ids = ((ids + 1) % SEGMENT_LENGTH).clamp(min=0)
        return Positions(ids, torch.tensor([[length]]), token_ids=token_ids)

    def random_heads(self, length: int, seed: int = INPUT_SEED) -> tuple[Tensor, Tensor, Tensor]:
        """Independent standard normal queries, keys and hidden states.

        Returns:
            `(1, heads, length, head_dim)` twice, and `(1, length, hidden)`.
        """
        generator = torch.Generator().manual_seed(seed)
        heads, width = self.context.num_heads, self.context.head_dim
        query, key = (torch.randn(1, heads, length, width, generator=generator) for _ in range(2))
        return query, key, torch.randn(1, length, self.context.hidden_size, generator=generator)


def subject_of(config: SchemeConfig, context: BuildContext | None = None) -> Subject:
    """Builds a scheme for its figures.

    Args:
        config: any scheme or arrangement.
        context: the place; by default 8 heads of 64 dimensions, a hidden size of 128 and 512 positions in a causal
            model, or the first of a few variations of it (heads of 128 dimensions, a bidirectional model) at which the
            scheme can be built.

    Raises:
        ValueError: if the scheme cannot be built at any of these places. The message is the reason for the first one.
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
    """Returns the place of figures or of counts, followed by variations for schemes that need them."""
    wide = dataclasses.replace(base, head_dim=128)
    return (base, wide, dataclasses.replace(base, causal=False), dataclasses.replace(wide, causal=False))


def shortened(text: str, width: int) -> str:
    """Returns `text`, cut to at most `width` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


@torch.no_grad()
def _built(config: SchemeConfig, context: BuildContext) -> Subject:
    parts, other = (build_parts(config, context, seed) for seed in (PARAMETER_SEED, PARAMETER_SEED + 1))
    generator = torch.Generator().manual_seed(PARAMETER_SEED)
    enlarged: list[str] = []
    for part, twin in zip(parts, other, strict=True):
        for (name, parameter), fresh in zip(part.named_parameters(), twin.parameters(), strict=True):
            # A value that is not zero and does not depend on the seed was chosen, so it is kept.
            small = not torch.equal(parameter, fresh) and float(parameter.float().square().mean().sqrt()) < TINY
            if not parameter.any() or small:
                std = VECTOR_STD if parameter.ndim < 2 else float(parameter.shape[-1] ** -0.5)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                enlarged.append(name)
    return Subject(config, context, parts, tuple(dict.fromkeys(enlarged)))


#: A logit below this hides a key completely. On a colour scale it would make all other differences invisible.
AWAY = -1000.0


def added_vectors(subject: Subject, length: int) -> Tensor:
    """`(length, hidden)`: what an additive encoding adds at positions `0 .. length - 1`."""
    assert subject.parts.additive is not None
    return subject.parts.additive(subject.positions(length))[0].float()


def mapped_vectors(subject: Subject, query: Tensor, length: int, step: int = 1) -> Tensor:
    """`(length, width)`: one query `(head_dim,)` of the first head, mapped at `length` positions, `step` apart."""
    part = subject.parts.query_key_map
    assert part is not None
    repeated = query.expand(1, subject.context.num_heads, length, query.shape[-1])
    return part.map_query(repeated, part.phases(subject.positions(length, step)))[0, 0].float()


def random_query(subject: Subject) -> Tensor:
    """`(head_dim,)`: a standard normal query."""
    return torch.randn(subject.context.head_dim, generator=torch.Generator().manual_seed(INPUT_SEED))


def bias_matrix(subject: Subject, length: int) -> Tensor:
    """`(heads, length, length)`: what the bias adds for standard normal queries, keys and hidden states."""
    assert subject.parts.logit_bias is not None
    query, key, hidden = subject.random_heads(length)
    pairs = attention_pairs(subject.parts, query, key, subject.positions(length), hidden)
    return pairwise_bias(subject.parts.logit_bias, pairs)[0].float()


def visible(subject: Subject, length: int) -> Tensor:
    """`(length, length)` bool, one row per query: which keys a model at this place can see."""
    every = torch.ones(length, length, dtype=torch.bool)
    return every.tril() if subject.context.causal else every


def equal_query_key_logits(subject: Subject, positions: Positions, samples: int) -> Tensor:
    """`(samples, heads, length, length)`: logits of tokens whose queries and keys are all one random vector.

    The vector is standard normal and the same in every head. Hidden states are independent.
    """
    heads, width, length = subject.context.num_heads, subject.context.head_dim, positions.ids.shape[-1]
    generator = torch.Generator().manual_seed(INPUT_SEED)
    vectors = torch.randn(samples, 1, 1, width, generator=generator)
    results = []
    for vector in vectors.expand(samples, heads, length, width).split(1):
        hidden = torch.randn(1, length, subject.context.hidden_size, generator=generator)
        results.append(positional_logits(subject.parts, vector, vector, positions, hidden))
    return torch.cat(results)


def turning_frequencies(subject: Subject, length: int) -> Tensor | None:
    """Returns the radians by which each pair turns per position, in a sequence of `length` tokens.

    Returns:
        `(rows, pairs)`, one row for all heads, or one per head, or one per axis of a map that reads coordinates; `None`
        if the map does not provide its angles or frequencies.
    """
    part = subject.parts.query_key_map
    angles, frequencies = getattr(part, "angles", None), getattr(part, "inverse_frequencies", None)
    if part is None or (not callable(angles) and frequencies is None):
        return None
    lengths = torch.tensor([[length]])
    if callable(angles) and part.reads_coordinates:
        axes = int(getattr(part, "axes", 2))
        steps = torch.cat((torch.zeros(axes, 1, dtype=torch.int64), torch.eye(axes, dtype=torch.int64)), dim=1)
        turned = angles(Positions(integer_range(0, axes + 1), lengths, coordinates=steps.unsqueeze(1)))[0]
        per_axis: Tensor = (turned[1:] - turned[:1]).float()
        return per_axis if per_axis.ndim == 2 else per_axis[:, 0]
    if callable(angles):
        turned = angles(Positions(integer_range(0, 2), lengths))[0]
        frequencies = turned[1] - turned[0]
    elif callable(frequencies):
        frequencies = frequencies(lengths)
    assert isinstance(frequencies, Tensor)
    return frequencies.float().reshape(-1, frequencies.shape[-1])
