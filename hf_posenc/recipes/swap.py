"""Swaps of the position encoding of a pretrained model, with a fitted initialization."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import TEXT
from hf_posenc.patching.inspection import native_scheme_of
from hf_posenc.patching.patch import place_scheme, requested_scheme, warn_of_random_rows
from hf_posenc.patching.place.encoding import PositionEncoding, scheme_in_part
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.recipes.gradual import new_scheme, place_blend
from hf_posenc.recipes.initialization.model import fit_encoding
from hf_posenc.recipes.initialization.parts import TABLE_EXTENSIONS, Fit
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.registry import SchemeLike, as_scheme

ModelType = TypeVar("ModelType", bound=nn.Module)

INITIALIZATIONS = ("auto", "fitted", "default")


@dataclass(frozen=True)
class Swap(Generic[ModelType]):
    """The result of `swap_scheme`.

    Args:
        model: the model, with its new scheme.
        old: the previous scheme; `None` if no scheme describes the native mechanism.
        new: the new scheme.
        gradual: whether the model is a blend of both, at strength 0.
        fits: the parts that were fitted to the old scheme.
        options: options of the new scheme that were taken from the old scheme.
        part: the part of the model whose scheme was swapped, such as "text".
    """

    model: ModelType
    old: SchemeConfig | None
    new: SchemeConfig
    gradual: bool
    fits: tuple[Fit, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    part: str = TEXT

    def to_dict(self) -> dict[str, Any]:
        """Returns everything except the model, in a form that can be written to JSON."""
        return {
            "old": None if self.old is None else self.old.to_dict(),
            "new": self.new.to_dict(),
            "gradual": self.gradual,
            "fits": [dataclasses.asdict(fit) for fit in self.fits],
            "options": self.options,
            "part": self.part,
        }


def swap_scheme(
    model: ModelType,
    scheme: SchemeLike,
    *,
    part: str | None = None,
    layers: Iterable[int] | None = None,
    elsewhere: SchemeLike | None = None,
    cross_attention: SchemeLike | bool = False,
    initialization: str = "auto",
    sample: Tensor | None = None,
    table_extension: str | None = None,
    gradual: bool = False,
    **options: Any,
) -> Swap[ModelType]:
    """Patches a pretrained model with a new scheme and fits its parameters to the old scheme.

    Like `patch_model`, with a better initialization where the old scheme allows it:

    - a learned table gets the vectors that the old scheme added, row by row. A longer table is extended from them. If
      the old scheme added nothing, the table starts at zero;
    - a learned bias (t5, kerple, learned alibi slopes, fire) is fitted, per head, to a difference of mean logits by
      distance on `sample`: the logits of the old scheme minus the logits of the new scheme without its bias. If the old
      scheme adds vectors to embeddings, the model runs once without them for this; otherwise both are computed from the
      same heads;
    - a learned logit scale is fitted to the old one, or to 1;
    - if both schemes are rotations, the new one keeps the old `theta`, unless the new scheme is given as a config or
      with a `theta`.

    Fits are least-squares fits over all pairs of tokens of the sample. Content biases (shaw, cope, forget_gate, ...)
    and rotations are not fitted, because their effect depends on content. Vectors and biases of grids, and biases of
    parts that do not read token ids, are not fitted either: a scheme keeps the native tables that it takes over, and
    everything else starts as in `patch_model`.

    Args:
        model: patched or not; may be wrapped in a PEFT model.
        scheme: the new scheme, as in `patch_model`.
        part: the part of a composite model whose scheme is swapped, as in `patch_model`.
        layers: indices of the layers that get the scheme, as in `patch_model`; not with `gradual`.
        elsewhere: the scheme of the other layers, as in `patch_model`.
        cross_attention: the scheme of cross-attention, as in `patch_model`.
        initialization: "auto" fits what can be fitted; "fitted" raises if nothing can be fitted; "default" is the same
            as `patch_model`.
        sample: `(batch, length)` token ids of ordinary text, without padding, long enough for the distances that
            matter. Needed to fit biases. In a composite model, its text part reads it without images.
        table_extension: how a longer learned table continues past the old positions: "linear" (the default),
            "long_clip", "spline", "repeat" or "last", see `extended_rows`.
        gradual: makes the model a blend at strength 0, which does not change outputs; `GradualSwapCallback` then
            increases the strength.
        **options: fields of the new scheme's config, if the scheme is given by name.

    Returns:
        A `Swap` with the model, the fitted parts and their residuals.

    Raises:
        ValueError: for an unknown option, if a bias is to be fitted without a sample, for a sample of a part that does
            not read token ids, or for a scheme that names several parts.
        UnknownNameError: for a part that the model does not have.
        UnsupportedError: as `patch_model`; with "fitted", if nothing of the old scheme can be transferred; and with
            `gradual`, if one of the two schemes cannot be blended.

    In all of these cases the model is left unchanged.
    """
    for name, value, choices in (
        ("initialization", initialization, INITIALIZATIONS),
        ("table_extension", table_extension, (None, *TABLE_EXTENSIONS)),
    ):
        if value not in choices:
            expected = ", ".join(repr(choice) for choice in choices if choice)
            raise ValueError(f"{name} is {value!r}; expected one of {expected}.")
    if table_extension is not None and initialization == "default":
        raise ValueError(
            "table_extension controls how a table is fitted, but initialization='default' does not fit anything. "
            "Omit one of them."
        )
    if gradual and layers is not None:
        raise ValueError("`layers` cannot be combined with `gradual`. Give a ScheduleConfig with a scheme per layer.")
    transaction = Transaction(model)
    place: Any = place_blend if gradual else partial(place_scheme, layers=layers, elsewhere=elsewhere)
    part = transaction.anatomy.part(part)
    with contextlib.ExitStack() as undo:
        undo.callback(restore_encoding, transaction, transaction.encoding)
        old = _scheme_in_force(transaction, part, required=gradual or initialization == "fitted")
        carried = {} if initialization == "default" else _carried_options(scheme, options, old)
        config = requested_scheme(transaction, scheme, options | carried, part, layers, elsewhere, cross_attention)
        if isinstance(config, PartsConfig):
            raise ValueError("swap_scheme swaps the scheme of one part. Call it once for each, with part=...")
        fits: list[Fit] = []
        if initialization == "default" or old is None:
            unfilled = place(transaction, config, part)
            if not gradual:
                warn_of_random_rows(unfilled, config)
        else:
            if scheme_in_part(transaction.encoding, part) is None:
                place_scheme(transaction, old, part)
            before = transaction.encoding  # Its parts stay usable after they are replaced.
            place(transaction, config, part)
            after = transaction.encoding
            assert before is not None
            assert after is not None
            fits = fit_encoding(transaction, before, after, sample, table_extension, part)
        if initialization == "fitted" and not fits and not carried:
            remedy = " With the option learnable it has slopes that can be fitted." if config.name == "alibi" else ""
            raise UnsupportedError(
                f"Nothing of the old scheme ({'unknown' if old is None else old.name}) can be transferred to "
                f"{config.name!r}: it has no table, distance bias or logit scale with parameters that can be "
                f"fitted.{remedy} Use the initialization 'default', a gradual swap, or both."
            )
        if table_extension is not None and not any("extended" in fit.target for fit in fits):
            raise ValueError(
                f"table_extension={table_extension!r} fills the rows of a new learned table beyond the vectors of the "
                f"old scheme. There are no such rows: the old scheme is {'unknown' if old is None else old.name!r}, "
                f"and the new one is {config.name!r}. Omit it."
            )
        undo.pop_all()
    placed = scheme_in_part(transaction.encoding, part)
    assert placed is not None
    return Swap(model, old, new_scheme(placed), gradual, tuple(fits), carried, part)


def _scheme_in_force(transaction: Transaction, part: str, required: bool) -> SchemeConfig | None:
    in_force = scheme_in_part(transaction.encoding, part)
    if in_force is not None:
        return in_force
    try:
        return native_scheme_of(transaction, part)
    except UnsupportedError:
        if required:
            raise
        return None


def _carried_options(scheme: SchemeLike, options: dict[str, Any], old: SchemeConfig | None) -> dict[str, Any]:
    """Returns options of the old scheme that the new scheme should keep, if it is given by name."""
    theta = getattr(old, "theta", None)
    if not isinstance(scheme, str) or theta is None:
        return {}
    config = as_scheme(scheme, **options)
    return {"theta": theta} if hasattr(config, "theta") and not config.gave("theta") else {}


def restore_encoding(transaction: Transaction, before: PositionEncoding | None) -> None:
    """Gives a model the encoding that it had; `None` if it was not patched."""
    if transaction.encoding is not before:
        transaction.undo() if before is None else transaction.install(before)
