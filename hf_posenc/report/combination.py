"""Combines the results of one evaluation for several models into one result, with one table and one figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_posenc.errors import MeasurementError
from hf_posenc.report.records import Record, Result, Subject, View

#: Settings that describe the model, not the measurement.
_MODEL_SETTINGS = ("model", "of_model", "models")
#: What a difference in a setting means, if its values alone do not say it.
_REASONS = {
    "causal": "one model predicts the next token and the other masked tokens",
    "data": "they read different data: a different text, another amount of it, or other tokens (another tokenizer)",
}


def shortest_names(paths: Sequence[str | Path]) -> list[str]:
    """Returns the last parts of each path, as few as distinguish it from the other paths.

    >>> shortest_names(["runs/a/final", "runs/b/final", "org/bert"])
    ['a/final', 'b/final', 'bert']

    Raises:
        MeasurementError: if a path is given twice.
    """
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    names = []
    for path, names_in_path in zip(paths, parts, strict=True):
        if parts.count(names_in_path) > 1:
            raise MeasurementError(f"{path} is given twice.")
        lengths = range(1, len(names_in_path) + 1)
        length = next(n for n in lengths if [other[-n:] for other in parts].count(names_in_path[-n:]) == 1)
        names.append(os.path.join(*names_in_path[-length:]))
    return names


def combine_results(results: Mapping[str, Result]) -> Result:
    """Combines the results of several models into one.

    Args:
        results: by model name. The name becomes the label of the model's row. If several schemes were measured in the
            model, it becomes a prefix of their labels. The rows of a combined result keep their labels.

    Raises:
        MeasurementError: if the results were not measured in the same way. The message names the difference.
    """
    (first_name, first), *others = results.items()
    for name, other in others:
        if reason := _difference(first, other):
            raise MeasurementError(f"{first_name} and {name} cannot share a table or figure: {reason}.")
    subjects: list[Subject] = []
    records: list[Record] = []
    models: dict[str, Any] = {}
    for name, result in results.items():
        labels = {subject.label: _label(name, subject, result) for subject in result.subjects}
        subjects += [replace(subject, label=labels[subject.label]) for subject in result.subjects]
        records += [replace(record, subject=labels[record.subject]) for record in result.records]
        models |= result.settings.get("models") or {name: result.settings.get("of_model", {})}
    names = [subject.label for subject in subjects]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise MeasurementError(f"{', '.join(repeated)}: more than one of the results has a row with this name.")
    model = f"{len(models)} models"
    shared = {key: value for key, value in first.settings.items() if key not in _MODEL_SETTINGS}
    return replace(
        first,
        title=model + first.title.removeprefix(first.settings.get("model", "")),
        quantities=tuple(
            {quantity.name: quantity for result in results.values() for quantity in result.quantities}.values()
        ),
        subjects=tuple(subjects),
        # Models may have different numbers of layers. Columns are still in ascending order.
        records=tuple(sorted(records, key=lambda record: record.at.get("layer", 0))),
        views=tuple(map(_joined_view, zip(*(result.views for result in results.values()), strict=True))),
        settings={"model": model, "models": models, **shared},
        remarks=tuple(dict.fromkeys(remark for result in results.values() for remark in result.remarks)),
    )


def _difference(first: Result, other: Result) -> str:
    """Returns why two results cannot be compared; empty if they can."""
    if first.task != other.task:
        return f"they come from different evaluations, {first.task!r} and {other.task!r}"
    if len(first.views) != len(other.views):
        return (
            f"they have {len(first.views)} and {len(other.views)} views, but the tables of both are expected to match"
        )
    # Different options also change the data, so they are reported first.
    for key in sorted({**first.settings, **other.settings}, key="data".__eq__):
        value, other_value = first.settings.get(key), other.settings.get(key)
        if key not in _MODEL_SETTINGS and value != other_value:
            return _REASONS.get(key, f"{key.replace('_', ' ')} is {value!r} for one and {other_value!r} for the other")
    return ""


def _label(name: str, subject: Subject, result: Result) -> str:
    if "models" in result.settings:
        return subject.label
    return name if len(result.subjects) == 1 else f"{name}: {subject.label}"


def _joined_view(views: Sequence[View]) -> View:
    """Returns a view that shows everything that any of the views shows."""
    shown = {
        key: list(dict.fromkeys(value for view in views for value in view.shown.get(key, ()))) for key in views[0].shown
    }
    return replace(views[0], shown=shown)
