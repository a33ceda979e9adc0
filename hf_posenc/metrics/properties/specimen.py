"""A scheme at the standard place, with weights, contents and projections that all properties share; measuring one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import MeasurementError, PositionEncodingError
from hf_posenc.metrics.evaluation import resolve_scheme
from hf_posenc.preserve import isolated_rng
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.positions import Positions

#: The standard place: small, and of the widths for which the literature gives numbers (d = 64).
HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 64, 4, 64
#: The length "the stock model was trained for": tables have this many rows, and what lies beyond is extrapolation.
TRAINING_LENGTH = 1024
#: Of the weights of parts and projections, and of the contents of tokens.
SEED = 0
#: A learned tensor whose root mean square is below this one is drawn anew: at zero, or at the 0.02 of BERT, it would
#: show its initialisation and not what the mechanism can do.
SMALL_WEIGHT, REDRAWN_STD = 0.1, 0.25


@dataclass(frozen=True, eq=False)
class Specimen:
    """The parts of a scheme at the standard place, and random tokens to put there.

    A token's logits are those of its contents and its position: `x = content + additive(p)`, queries and keys are
    random projections of `x`, and the parts do the rest (`positional_logits`). Contents are drawn from N(0, 1) per
    component and the projections keep that variance, so that without positions logits have a variance of 1.

    Args:
        config: the options of the scheme.
        context: the place.
        parts: built from `config` at `context`, in evaluation mode.
        redrawn: names of the learned tensors that were drawn anew because they start near zero.
        query_weight: `(hidden, heads * head_dim)`.
        key_weight: `(hidden, heads * head_dim)`.
    """

    config: SchemeConfig
    context: BuildContext
    parts: SchemeParts
    redrawn: tuple[str, ...]
    query_weight: Tensor
    key_weight: Tensor

    @property
    def causal(self) -> bool:
        """Whether the parts are those of a causal model, and only keys at or before the query are compared."""
        return self.context.causal

    def visible(self, length: int) -> Tensor:
        """`(length, length)` bool: the pairs of query and key that are compared."""
        everything = torch.ones(length, length, dtype=torch.bool)
        return everything.tril() if self.causal else everything

    def additive(self, positions: Positions) -> Tensor:
        """`(batch or 1, length, hidden)` float32: what the scheme adds to token representations; zeros if nothing."""
        if self.parts.additive is None:
            return torch.zeros(*positions.ids.shape, self.context.hidden_size)
        return self.parts.additive(positions).float()

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, each `(batch, heads, length, head_dim)`, of `(batch, length, hidden)`."""
        query, key = (
            (hidden_states @ weight.to(hidden_states.dtype)).unflatten(-1, (self.context.num_heads, -1)).transpose(1, 2)
            for weight in (self.query_weight, self.key_weight)
        )
        return query, key

    def logits(self, positions: Positions, contents: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`(batch, heads, length, length)`: the logits of tokens with contents `(batch, length, hidden)`.

        Contents, projections, queries, keys and logits are rounded to `dtype`; the parts compute in float32 from
        integer positions whatever it is, as they do in a model.
        """
        hidden_states = contents.to(dtype) + self.additive(positions).to(dtype)
        return positional_logits(self.parts, *self.projected(hidden_states), positions, hidden_states.float())


def build_specimen(scheme: str | SchemeConfig | Specimen, *, causal: bool | None = None, seed: int = SEED) -> Specimen:
    """Builds a scheme at the standard place.

    It has 4 heads of 64 dimensions over a hidden size of 64 and a training length of 1024. Weights are the scheme's own
    initialisation, except that learned tensors with a root mean square below 0.1 are drawn from N(0, 0.25^2): what is
    measured is the mechanism, not its first step of training.

    Args:
        scheme: a name, a config, or a specimen, which is returned as it is.
        causal: whether the place is a causal model; `None` for a bidirectional one, or a causal one if the scheme
            refuses that. Some schemes are another function there (`specimen_forms`).
        seed: of all weights; the random state of the process is left as it was.

    Raises:
        UnknownNameError: for an unknown scheme.
        MeasurementError: if the scheme cannot be built from its name alone, or not at this place.
    """
    if isinstance(scheme, Specimen):
        return scheme
    config = resolve_scheme(scheme)
    context = BuildContext(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, causal=bool(causal), max_positions=TRAINING_LENGTH)
    try:
        parts = build_parts(config, context, seed)
    except ValueError as error:
        if causal is not None or "bidirectional" not in str(error):
            raise MeasurementError(
                f"The scheme {config.name!r} cannot be built at the standard place: {error}"
            ) from error
        return build_specimen(config, causal=True, seed=seed)
    redrawn = []
    with isolated_rng(seed), torch.no_grad():
        for part in parts:
            for name, parameter in part.named_parameters():
                if parameter.square().mean().sqrt() < SMALL_WEIGHT:
                    nn.init.normal_(parameter, std=REDRAWN_STD)
                    redrawn.append(f"{type(part).__name__}.{name}")
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (2, HIDDEN_SIZE, NUM_HEADS * HEAD_DIM)
    query_weight, key_weight = torch.randn(shape, generator=generator) * HIDDEN_SIZE**-0.5
    return Specimen(config, context, parts, tuple(redrawn), query_weight, key_weight)


@torch.no_grad()
def specimen_forms(scheme: str | SchemeConfig) -> tuple[Specimen, ...]:
    """A scheme in each of its forms, with the same weights.

    Two, causal and then bidirectional, where a query and an earlier key get another logit in a causal model than in a
    bidirectional one: because the scheme reads the number of visible keys, or divides its table among both sides. This
    is measured, with random contents and two sets of positions: the first 96, and 96 of all up to 32 times the
    training length, because some schemes follow the length only past a threshold. One where the forms agree or the
    scheme has only one. The errors are those of `build_specimen`.
    """
    specimen = build_specimen(scheme)
    if specimen.causal:
        return (specimen,)
    try:
        causal = build_specimen(specimen.config, causal=True)
    except MeasurementError:
        # A variant for bidirectional models only; its reason is not about this measurement.
        return (specimen,)
    generator = torch.Generator().manual_seed(0)
    far = torch.randperm(32 * TRAINING_LENGTH, generator=generator)[:96].sort().values
    contents, visible = random_contents(1, 96), causal.visible(96)
    for ids in (torch.arange(96), far):
        with contextlib.suppress(PositionEncodingError):
            first, second = (form.logits(positions_at(ids), contents)[..., visible] for form in (causal, specimen))
            # Not a number is one in both: a form that overflows does so at the same places.
            if not torch.allclose(first, second, rtol=1e-5, atol=1e-5, equal_nan=True):
                return causal, specimen
    return (specimen,)


def build_parts(config: SchemeConfig, context: BuildContext, seed: int) -> SchemeParts:
    """The parts in evaluation mode, with weights drawn from `seed`."""
    with isolated_rng(seed):
        parts = config.build(context)
    for part in parts:
        part.eval().requires_grad_(False)
    return parts


def positions_at(ids: Tensor, coordinates: Tensor | None = None, lengths: Tensor | None = None) -> Positions:
    """Tokens at the positions `(length,)`, or coordinates `(axes, length)`, of a sequence that ends with the last one.

    With `lengths` `(1, 1)` the sequence goes on after the tokens shown.
    """
    ids = ids.unsqueeze(0)
    # Schemes that cut a text into segments read the vocabulary ids; these repeat every eleven tokens.
    token_ids = (torch.arange(ids.shape[-1]) * 7 % 11).expand_as(ids)
    return Positions(
        ids,
        ids.amax(dim=-1, keepdim=True) + 1 if lengths is None else lengths,
        None if coordinates is None else coordinates.unsqueeze(1),
        token_ids,
    )


def random_contents(batch: int, length: int, *, seed: int = SEED) -> Tensor:
    """`(batch, length, hidden)`: contents drawn from N(0, 1) per component."""
    return torch.randn(batch, length, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed + 2))


def repeated_contents(batch: int, length: int) -> Tensor:
    """`(batch, length, hidden)`: in each row the same token everywhere, so that only positions tell tokens apart."""
    return random_contents(batch, 1).expand(-1, length, -1)


@dataclass(frozen=True)
class Measurement:
    """One property of one scheme.

    Args:
        passed: whether the scheme has the property; `None` where it does not apply to this scheme, or nothing of it
            could be evaluated.
        value: the number that decided.
        threshold: what it was compared with.
        details: further numbers.
        refused: what the scheme would not compute, with its own reason, such as positions past a table.
        reason: why the property does not apply.
        shown: what a table shows in place of the value, where that does not say why the property failed.
    """

    passed: bool | None
    value: float | None = None
    threshold: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    reason: str | None = None
    shown: str | None = None


class DoesNotApplyError(Exception):
    """The property says nothing about this scheme; the message says why."""


class Refusals(list[str]):
    """What a scheme refuses to compute, such as a position past its table, each with the reason."""

    @contextlib.contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Notes a refusal as `"<where>: <reason>"` instead of raising it."""
        try:
            yield
        except PositionEncodingError as error:
            self.append(f"{where}: {error}")


#: The value, further numbers, and where the value is not compared with the threshold, the verdict and what is shown.
Found = tuple[float | None, dict[str, Any]] | tuple[float | None, dict[str, Any], bool, str | None]


def measured(threshold: float) -> Callable[[Callable[..., Found | None]], Callable[..., Measurement]]:
    """Makes a measurement of a function `(specimen, refusals, ...)`.

    The new function takes a name, a config or a specimen in place of both, and computes no gradients. A function that
    returns `None` found everything refused.

    Args:
        threshold: the largest value that passes.
    """

    def decorate(function: Callable[..., Found | None]) -> Callable[..., Measurement]:
        @functools.wraps(function)
        @torch.no_grad()
        def measure(scheme: str | SchemeConfig | Specimen, *arguments: Any, **options: Any) -> Measurement:
            specimen, refusals, measurement = build_specimen(scheme), Refusals(), None
            try:
                with refusals.at("everything asked for"):
                    measurement = function(specimen, refusals, *arguments, **options)
            except DoesNotApplyError as reason:
                return Measurement(None, reason=str(reason))
            if measurement is None:
                why = "the scheme refuses all positions that were asked for"
                return Measurement(None, refused=tuple(refusals), reason=why)
            within = measurement[0] is not None and measurement[0] <= threshold
            value, details, passed, shown = measurement if len(measurement) == 4 else (*measurement, within, None)
            return Measurement(passed, value, threshold, details, tuple(refusals), shown=shown)

        return measure

    return decorate
