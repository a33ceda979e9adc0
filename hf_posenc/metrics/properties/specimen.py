"""A scheme in the standard setting, with weights, contents and projections that all properties share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import MeasurementError, PositionEncodingError
from hf_posenc.preserve import isolated_rng
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.registry import as_scheme

#: The standard setting: small, with the widths for which the literature gives numbers (d = 64).
HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 64, 4, 64
#: The assumed training length of the stock model: tables have this many rows, and more positions are extrapolation.
TRAINING_LENGTH = 1024
#: Seed of the weights of parts and projections, and of the contents of tokens.
SEED = 0
#: A learned tensor whose root mean square is below this is drawn again: at zero, or at the 0.02 of BERT, it would show
#: its initialisation and not what the mechanism can do.
SMALL_WEIGHT, REDRAWN_STD = 0.1, 0.25


@dataclass(frozen=True, eq=False)
class Specimen:
    """The parts of a scheme in the standard setting, and random tokens for them.

    The logits of a token follow from its content and its position: `x = content + additive(p)`, queries and keys are
    random projections of `x`, and the parts do the rest (`positional_logits`). Contents are drawn from N(0, 1) per
    component, and projections keep that variance, so that logits have a variance of 1 without positions.

    Args:
        config: the options of the scheme.
        context: the setting.
        parts: built from `config` for `context`, in evaluation mode.
        redrawn: names of the learned tensors that were drawn again because they start near zero.
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
        """Returns `(length, length)` bool: the pairs of query and key that are compared."""
        everything = torch.ones(length, length, dtype=torch.bool)
        return everything.tril() if self.causal else everything

    def additive(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, length, hidden)` float32: what the scheme adds to token representations, or zeros."""
        if self.parts.additive is None:
            return torch.zeros(*positions.ids.shape, self.context.hidden_size)
        return self.parts.additive(positions).float()

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries and keys, each `(batch, heads, length, head_dim)`, of `(batch, length, hidden)`."""
        products = (hidden_states @ weight.to(hidden_states.dtype) for weight in (self.query_weight, self.key_weight))
        query, key = (each.unflatten(-1, (self.context.num_heads, -1)).transpose(1, 2) for each in products)
        return query, key

    def logits(self, positions: Positions, contents: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns `(batch, heads, length, length)`: the logits of tokens with contents `(batch, length, hidden)`.

        Contents, projections, queries, keys and logits are rounded to `dtype`. The parts always compute in float32 from
        integer positions, as they do in a model.
        """
        hidden_states = contents.to(dtype) + self.additive(positions).to(dtype)
        return positional_logits(self.parts, *self.projected(hidden_states), positions, hidden_states.float())


def build_specimen(scheme: str | SchemeConfig | Specimen, *, causal: bool | None = None, seed: int = SEED) -> Specimen:
    """Builds a scheme in the standard setting.

    It has 4 heads of 64 dimensions, a hidden size of 64 and a training length of 1024. Weights have the initialisation
    of the scheme, except that learned tensors with a root mean square below 0.1 are drawn from N(0, 0.25^2): the
    properties are those of the mechanism, not of its first step of training.

    Args:
        scheme: a name, a config, or a specimen, which is returned as it is.
        causal: whether the setting is a causal model; `None` for a bidirectional one, or a causal one if the scheme
            refuses that. Some schemes differ between the two (`specimen_forms`).
        seed: seed of all weights; the random state of the process does not change.

    Raises:
        UnknownNameError: for an unknown scheme.
        MeasurementError: if the scheme cannot be built in this setting.
        ValueError: if a scheme given by name needs options.
    """
    if isinstance(scheme, Specimen):
        return scheme
    config = as_scheme(scheme)
    context = BuildContext(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, causal=bool(causal), max_positions=TRAINING_LENGTH)
    try:
        parts = build_parts(config, context, seed)
    except ValueError as error:
        if causal is not None or "bidirectional" not in str(error):
            raise MeasurementError(
                f"The scheme {config.name!r} cannot be built in the standard setting: {error}"
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
    """Returns a scheme in each of its forms, with the same weights.

    There are two, causal and then bidirectional, if a query and an earlier key get different logits in a causal model
    and in a bidirectional one: because the scheme depends on the number of visible keys, or divides its table between
    both sides. This is measured, with random contents and two sets of positions: the first 96, and 96 of all up to 32
    times the training length, because some schemes depend on the length only beyond a threshold. There is one if the
    forms agree or the scheme has only one. The errors are those of `build_specimen`.
    """
    specimen = build_specimen(scheme)
    if specimen.causal:
        return (specimen,)
    try:
        causal = build_specimen(specimen.config, causal=True)
    except MeasurementError:
        # The scheme is for bidirectional models only, which is not an error here.
        return (specimen,)
    generator = torch.Generator().manual_seed(0)
    far = torch.randperm(32 * TRAINING_LENGTH, generator=generator)[:96].sort().values
    contents, visible = random_contents(1, 96), causal.visible(96)
    for ids in (torch.arange(96), far):
        with contextlib.suppress(PositionEncodingError):
            first, second = (form.logits(positions_at(ids), contents)[..., visible] for form in (causal, specimen))
            # NaN equals NaN: if a form overflows, the other does so at the same places.
            if not torch.allclose(first, second, rtol=1e-5, atol=1e-5, equal_nan=True):
                return causal, specimen
    return (specimen,)


def build_parts(config: SchemeConfig, context: BuildContext, seed: int) -> SchemeParts:
    """Builds the parts in evaluation mode, with weights drawn from `seed`."""
    with isolated_rng(seed):
        parts = config.build(context)
    for part in parts:
        part.eval().requires_grad_(False)
    return parts


def positions_at(ids: Tensor, coordinates: Tensor | None = None, lengths: Tensor | None = None) -> Positions:
    """Tokens at the positions `(length,)`, or coordinates `(axes, length)`, of a sequence that ends with the last one.

    With `lengths` `(1, 1)`, the sequence continues after these tokens.
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
    """Returns `(batch, length, hidden)`: contents drawn from N(0, 1) per component."""
    return torch.randn(batch, length, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed + 2))


def repeated_contents(batch: int, length: int) -> Tensor:
    """Returns `(batch, length, hidden)`: the same token everywhere in a row, so that tokens differ only by position."""
    return random_contents(batch, 1).expand(-1, length, -1)


@dataclass(frozen=True)
class Measurement:
    """One property of one scheme.

    Args:
        passed: whether the scheme has the property; `None` if it does not apply, or nothing of it could be evaluated.
        value: the number that decided.
        threshold: the number that the value was compared with.
        details: further numbers.
        refused: what the scheme refused to compute, with its reason, such as positions beyond a table.
        reason: why the property does not apply.
        shown: what a table shows instead of the value, if that does not show why the property failed.
    """

    passed: bool | None
    value: float | None = None
    threshold: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    reason: str | None = None
    shown: str | None = None


class DoesNotApplyError(Exception):
    """The property does not apply to this scheme; the message says why."""


class Refusals(list[str]):
    """What a scheme refused to compute, such as a position beyond its table, each with the reason."""

    @contextlib.contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Records a refusal as `"<where>: <reason>"` instead of raising it."""
        try:
            yield
        except PositionEncodingError as error:
            self.append(f"{where}: {error}")


#: The value and further numbers; if the value is not compared with the threshold, also the verdict and what is shown.
Found = tuple[float | None, dict[str, Any]] | tuple[float | None, dict[str, Any], bool, str | None]


def measured(threshold: float) -> Callable[[Callable[..., Found | None]], Callable[..., Measurement]]:
    """Makes a measurement from a function `(specimen, refusals, ...)`.

    The new function takes a name, a config or a specimen instead of both, and computes no gradients. If the function
    returns `None`, the scheme refused everything.

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
