"""Evaluations: they repeat one measurement under several schemes and make a result of its records."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import COLLECTED, SequenceLengthError, UnsupportedError
from hf_posenc.metrics.statistics import relative_changes, spread
from hf_posenc.patching import native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.preserve import isolated_rng
from hf_posenc.report.combination import shortest_names
from hf_posenc.report.records import Quantity, Record, Result, Subject, View, joined
from hf_posenc.schemes.config import SchemeConfig, names_native
from hf_posenc.schemes.registry import as_scheme
from hf_posenc.wrapping import setting

NATIVE = "native"

Measure = Callable[[Any], Sequence[Record]]
#: The subjects that were measured, and their records.
Measured = tuple[tuple[Subject, ...], tuple[Record, ...]]
_Part = tuple[Subject, Sequence[Record]]


def evaluation_result(
    task: str,
    title: str,
    model: Any,
    measured: Measured,
    quantities: Sequence[Quantity],
    *,
    views: Sequence[View] = (),
    rows: tuple[str, ...] = (),
    layers: int | None = None,
    settings: Mapping[str, Any],
    of_model: Mapping[str, Any] | None = None,
    remarks: Sequence[str] = (),
) -> Result:
    """Builds the result of an evaluation. Its title starts with the model's name: its folder or hub id, or its class.

    `settings` must be equal for two results to be compared; `of_model` applies only to this model. Without `views`
    there is one table of all quantities, with `rows` as in a `View`. Tables show at most this many `layers`, evenly
    spread up to the last; all of them if it is `None`.
    """
    (subjects, records), target = measured, unwrapped(model)
    kind, path = type(target).__name__, getattr(target, "name_or_path", "")
    name = shortest_names([path])[0] if path else kind
    shared = {"dtype": str(target.dtype).removeprefix("torch."), **settings}
    views = views or (View(tuple(quantity.name for quantity in quantities), rows=rows),)
    if layers is not None:
        shown = {"layer": spread(sorted({record.at["layer"] for record in records if "layer" in record.at}), layers)}
        views = [dataclasses.replace(view, shown={**view.shown, **shown}) for view in views]
    return Result(
        task=task,
        title=name + title,
        quantities=tuple(quantities),
        subjects=subjects,
        records=records,
        views=tuple(views),
        settings={"model": name, "of_model": {"class": kind, "path": path, **(of_model or {})}, **shared},
        remarks=tuple(remarks),
    )


def digest(*data: Tensor | np.ndarray | str) -> str:
    """Returns a hash of data or weights, so that results of different ones are not compared."""
    hashed = hashlib.sha256()
    for part in data:
        if isinstance(part, Tensor):
            # NumPy has no bfloat16.
            part = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        hashed.update(part.encode() if isinstance(part, str) else part.tobytes())
    return hashed.hexdigest()[:16]


def layer_distances(
    quantity: str, pairs: Iterable[tuple[Tensor, Tensor]], at: Mapping[str, Any] | None = None, count: int | None = None
) -> list[Record]:
    """Returns the mean relative distance between two batches of states, a pair of `(batch, ...)`, for each layer."""
    return [
        Record("", quantity, float(relative_changes(*pair).mean()), {**(at or {}), "layer": layer}, count=count)
        for layer, pair in enumerate(pairs)
    ]


def measure_as_is(model: Any, measure: Measure) -> Measured:
    """Measures a model with its current scheme. What the model cannot do is an error and not a row of the result."""
    return joined([(subject_in_force(model), measure(model))])


def measure_schemes(
    model: Any, schemes: Sequence[str | SchemeConfig] | None, measure: Measure, *, seed: int = 0
) -> Measured:
    """Patches each scheme into the stock model, measures it and removes it again.

    The model is left unchanged, also after an error: its own scheme is restored with its learned parameters. If a
    scheme does not fit the model, or cannot represent a sequence this long, the `error` of its subject has the reason.

    Args:
        model: any transformers model, patched or not.
        schemes: one or several names or configs, newly initialised unless a scheme takes over native weights;
            `"native"` is the stock model itself. Twice the same is measured once. `None` measures the model as it is.
        measure: gets the model and returns the records; their subject is filled in.
        seed: seed of newly created scheme weights.

    Returns:
        One subject per scheme, and the records of all.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        ValueError: if a scheme given by name needs options.
    """
    named = [schemes] if isinstance(schemes, str | SchemeConfig) else schemes or ()
    wanted = dict.fromkeys(None if scheme == NATIVE else as_scheme(scheme) for scheme in named)
    with isolated_rng(seed):
        if schemes is None:
            return joined([_measured(model, subject_in_force(model), measure)])
        with Transaction(model).suspended():
            return joined(
                _measured(model, subject_in_force(model), measure)
                if config is None
                else _patched(model, config, measure, seed)
                for config in wanted
            )


def config_in_force(model: Any) -> SchemeConfig | None:
    """Returns the current scheme of a model, which may be its native one; `None` if that is not a known scheme."""
    encoding = current_encoding(unwrapped(model))
    if encoding is not None:
        return encoding.config
    try:
        return native_scheme(model)
    except UnsupportedError:
        return None


def subject_in_force(model: Any) -> Subject:
    """Returns a model with its current scheme as a subject."""
    config = config_in_force(model)
    if config is None:
        return Subject(NATIVE, NATIVE, notes=("The native scheme is not one of the schemes of hf_posenc.",))
    if current_encoding(unwrapped(model)) is None:
        return Subject(f"{NATIVE} ({config.name})", NATIVE, config.to_dict())
    return Subject(config.label, config.name, config.to_dict())


def _patched(model: Any, config: SchemeConfig, measure: Measure, seed: int) -> _Part:
    subject = Subject(config.label, config.name, config.to_dict())
    notes: list[str] = []
    with isolated_rng(seed), setting(COLLECTED, notes):
        try:
            patch_model(model, config)
        except ValueError as error:
            return dataclasses.replace(subject, error=str(error)), ()
    try:
        encoding = current_encoding(unwrapped(model))
        if encoding is not None and names_native(config):
            subject = Subject(subject.label, encoding.config.name, encoding.config.to_dict())
        report = None if encoding is None else encoding.report
        adopted = [] if report is None else [entry for stack in report.stacks for entry in stack.adopted]
        if adopted:
            more = f" and {len(adopted) - 2} more" if len(adopted) > 2 else ""
            shown = ", ".join(adopted[:2]) + more
            notes.append(f"Takes over weights of the stock model ({shown}); the others are newly initialised.")
        return _measured(model, dataclasses.replace(subject, notes=tuple(notes)), measure)
    finally:
        unpatch_model(model)


def _measured(model: Any, subject: Subject, measure: Measure) -> _Part:
    try:
        return subject, measure(model)
    except (UnsupportedError, SequenceLengthError) as error:
        return dataclasses.replace(subject, error=str(error)), ()
