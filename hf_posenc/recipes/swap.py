"""Another position encoding in a pretrained model, losing as little as possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching import native_scheme, patch_model
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.patching.place.in_force import current_encoding
from hf_posenc.patching.place.refusals import unwrapped
from hf_posenc.patching.place.requested_scheme import SchemeLike, scheme_config
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.recipes.gradual import begin_blend, new_scheme
from hf_posenc.recipes.initialization.model import fit_encoding
from hf_posenc.recipes.initialization.parts import Fit
from hf_posenc.recipes.initialization.tables import TABLE_EXTENSIONS
from hf_posenc.report.records import Quantity, Record, Result, Subject, View
from hf_posenc.schemes import get_scheme
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.labels import scheme_label

ModelType = TypeVar("ModelType", bound=nn.Module)

_QUANTITIES = (
    Quantity("residual_before", "missed at its own start"),
    Quantity(
        "residual",
        "missed after the fit",
        "Root mean square of what the part misses, relative to that of what it was fitted to; - where that is zero.",
    ),
)
INITIALIZATIONS = ("auto", "fitted", "default")


@dataclass(frozen=True)
class Swap(Generic[ModelType]):
    """What `swap_scheme` did.

    Args:
        model: the model, with its new scheme.
        old: the scheme before; `None` where no scheme describes the native mechanism.
        new: the scheme now.
        gradual: whether the model is a blend of both, at strength 0.
        fits: the parts that start at what the old scheme did.
        options: options of the new scheme that were taken from the old one.
    """

    model: ModelType
    old: SchemeConfig | None
    new: SchemeConfig
    gradual: bool
    fits: tuple[Fit, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model, ready for JSON."""
        return {
            "old": None if self.old is None else self.old.to_dict(),
            "new": self.new.to_dict(),
            "gradual": self.gradual,
            "fits": [dataclasses.asdict(fit) for fit in self.fits],
            "options": self.options,
        }

    def result(self) -> Result:
        """How near each part starts to what the old scheme did: `residual` by `part`, with and without the fit."""
        label = scheme_label(self.new)
        records = [
            Record(
                label, quantity, getattr(fit, quantity), {"part": fit.where, "fitted to": fit.target}, count=fit.covers
            )
            for fit in self.fits
            for quantity in ("residual_before", "residual")
        ]
        old = "positions of no known scheme" if self.old is None else scheme_label(self.old)
        return Result(
            task="swap",
            title=f"{type(self.model).__name__}: {label} in the place of {old}",
            quantities=_QUANTITIES,
            subjects=(Subject(label, self.new.name, self.new.to_dict()),),
            records=tuple(records),
            views=(View(tuple(one.name for one in _QUANTITIES), rows=("part", "fitted to")),),
            settings={
                "old": None if self.old is None else self.old.to_dict(),
                "gradual": self.gradual,
                "options": self.options,
            },
        )


def swap_scheme(
    model: ModelType,
    scheme: SchemeLike,
    *,
    initialization: str = "auto",
    sample: Tensor | None = None,
    table_extension: str | None = None,
    gradual: bool = False,
    **options: Any,
) -> Swap[ModelType]:
    """Gives a pretrained model another scheme, whose parameters start at what the old scheme did.

    `patch_model` with a start that loses less. Where the old scheme leaves something to start from:

    - a learned table gets the vectors that the old scheme added, row by row; a longer one is extended from them, and
      one in a model that added nothing starts at zero;
    - a learned bias (t5, kerple, learned alibi slopes, fire) is fitted, per head, to the mean logits by distance that
      the old scheme makes on `sample` and the new one without its bias does not. If the old scheme adds vectors to
      embeddings, the model is run once without them for that; otherwise both are computed from the same heads;
    - a learned logit scale is fitted to the old one, or to 1;
    - `theta` of a rotation by rotation is the old one, if the new scheme is given by name and the option is left out.

    Fits are least squares over all pairs of tokens of the sample. Content biases (shaw, cope, forget_gate, ...) and
    rotations keep their own start: what they do has no mean over content.

    Args:
        model: patched or not; a PEFT model around it too.
        scheme: the new one, as in `patch_model`.
        initialization: "auto" fits what can be fitted; "fitted" requires that something is; "default" is what
            `patch_model` does.
        sample: `(batch, length)` token ids of ordinary text, without padding, as long as the distances that matter; for
            biases.
        table_extension: how a longer learned table continues past the old positions: "linear" (the default), "spline",
            "repeat" or "last", see `extended_rows`.
        gradual: leaves the model as a blend at strength 0, which computes what it did; `GradualSwapCallback` leads it
            on.
        **options: fields of the new scheme's config, for one given by name.

    Returns:
        The model, with what was fitted and how well.

    Raises:
        ValueError: for an unknown option, or a bias to be fitted without a sample.
        UnsupportedError: as `patch_model`; with "fitted", where nothing of the old scheme can be carried over; and with
            `gradual`, where one of the two cannot act by degrees.

    In every one of these cases the model is left as it was.
    """
    _check_choice("initialization", initialization, INITIALIZATIONS)
    if table_extension is not None:
        _check_choice("table_extension", table_extension, TABLE_EXTENSIONS)
        if initialization == "default":
            raise ValueError("table_extension says how a table is fitted, and initialization='default' fits nothing.")
    target = unwrapped(model)
    with _left_as_it_was(target):
        old = _scheme_in_force(target, required=gradual or initialization == "fitted")
        carried: dict[str, Any] = {}
        if initialization != "default":
            carried = _carried_options(scheme, options, old)
        config = scheme_config(scheme, options | carried)
        if initialization == "default" or old is None:
            fits: list[Fit] = []
            _place(target, config, gradual)
        else:
            before = _old_encoding(target, old)
            _place(target, config, gradual)
            after = current_encoding(target)
            assert after is not None
            fits = fit_encoding(target, before, after, sample, table_extension)
        if initialization == "fitted" and not fits and not carried:
            raise UnsupportedError(_nothing_to_fit(old, config))
        if table_extension is not None and not any("extended" in fit.target for fit in fits):
            raise ValueError(
                f"table_extension={table_extension!r} is for a learned table with more positions than the old scheme "
                f"({'unknown' if old is None else old.name}) has vectors for, and {config.name!r} has none here. Leave "
                "it out."
            )
    placed = current_encoding(target)
    assert placed is not None
    return Swap(model, old, new_scheme(placed.config), gradual, tuple(fits), carried)


@contextmanager
def _left_as_it_was(target: PreTrainedModel) -> Iterator[None]:
    """Puts the encoding of before back if anything goes wrong."""
    before = current_encoding(target)
    try:
        yield
    except BaseException:
        if current_encoding(target) is not before:
            transaction = Transaction(target)
            transaction.undo() if before is None else transaction.install(before)
        raise


def _scheme_in_force(target: PreTrainedModel, required: bool) -> SchemeConfig | None:
    encoding = current_encoding(target)
    if encoding is not None:
        return encoding.config
    try:
        return native_scheme(target)
    except UnsupportedError:
        if required:
            raise
        return None


def _old_encoding(target: PreTrainedModel, old: SchemeConfig) -> PositionEncoding:
    """The old scheme's encoding, its parts still usable after another one has taken their place."""
    if current_encoding(target) is None:
        patch_model(target, old)
    encoding = current_encoding(target)
    assert encoding is not None
    return encoding


def _place(target: PreTrainedModel, config: SchemeConfig, gradual: bool) -> None:
    if gradual:
        begin_blend(target, config)
    else:
        patch_model(target, config)


def _carried_options(scheme: SchemeLike, options: dict[str, Any], old: SchemeConfig | None) -> dict[str, Any]:
    """Options of the new scheme, given by name, that the trained weights were made for."""
    theta = getattr(old, "theta", None)
    if not isinstance(scheme, str) or scheme == "native" or theta is None or "theta" in options:
        return {}
    names = {field.name for field in dataclasses.fields(get_scheme(scheme))}
    return {"theta": theta} if "theta" in names else {}


def _nothing_to_fit(old: SchemeConfig | None, new: SchemeConfig) -> str:
    known = "unknown" if old is None else repr(old.name)
    remedy = " AlibiConfig(learnable=True) has slopes that can be." if new.name == "alibi" else ""
    return (
        f"Nothing of the old scheme ({known}) can be carried over into {new.name!r}: it has no table, no bias by "
        f"distance and no logit scale whose parameters could be fitted.{remedy} Use initialization='default', "
        "gradual=True, or both."
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")
