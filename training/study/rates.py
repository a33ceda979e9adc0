"""Learning rates that are chosen alike for every scheme, before a study trains with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from training.errors import SettingsError
from training.study.cells import UNSUPPORTED, default_options
from training.study.settings import SchemeOptions, StudySettings, TaskOptions


def rates_study(study: StudySettings) -> StudySettings:
    """The study that a choice is made from: every scheme with every rate, with one seed that the study does not use.

    Args:
        study: with `learning_rates`.

    Raises:
        SettingsError: if no scheme is left to choose for.
    """
    chosen_for, rates = _chosen_for(study), study.learning_rates
    if not chosen_for:
        raise SettingsError(
            "--learning_rates are for schemes that begin with new weights and have no learning rate of their own, and "
            "the study has none."
        )
    options = {}
    for label in chosen_for:
        asked = _asked(study, label)
        for rate in rates:
            training = asked.training | study.rate_settings | {"learning_rate": rate}
            options[_label(label, rate)] = SchemeOptions(
                **default_options(label, asked) | (asked.model_extra or {}),
                scheme=asked.scheme or label,
                training=training,
                swap=asked.swap,
            )
    tried = {
        name: [_label(label, rate) for label in own.schemes or study.schemes if label in chosen_for for rate in rates]
        for name in study.tasks
        for own in [study.task_options.get(name, TaskOptions())]
    }
    tasks = {
        name: study.task_options.get(name, TaskOptions()).model_copy(update={"seeds": None, "schemes": labels})
        for name, labels in tried.items()
        if labels
    }
    return study.model_copy(
        update={
            "name": f"{study.name}_rates",
            "description": "Trainings that learning rates are chosen from, with a seed that the study does not use.",
            "output_dir": f"{study.output_dir.rstrip('/')}_rates",
            "learning_rates": [],
            "rate_settings": {},
            "schemes": list(options),
            "scheme_options": options,
            "tasks": list(tasks),
            "task_options": tasks,
            "rate_seed": None,
            "seeds": [max(study.all_seeds) + 1 if study.rate_seed is None else study.rate_seed],
            "save_models": False,
        }
    )


def with_chosen_rates(study: StudySettings, results: dict[str, Any]) -> StudySettings:
    """The study with the rate of each scheme that had the lowest validation loss, as a mean over tasks.

    Args:
        study: with `learning_rates`.
        results: of its `rates_study`.

    Raises:
        SettingsError: if no rate of a scheme finished in every task, and the model could take the scheme.
    """
    options = dict(study.scheme_options)
    by_rate = losses_by_rate(results["runs"])
    unsupported = {run["scheme"] for run in results["runs"] if run.get("status") == UNSUPPORTED}
    for label in _chosen_for(study):
        asked = _asked(study, label)
        tried = {rate: by_rate.get(_label(label, rate), math.inf) for rate in study.learning_rates}
        best = min(tried, key=lambda rate: tried[rate])
        if tried[best] < math.inf:
            options[label] = asked.model_copy(update={"training": asked.training | {"learning_rate": best}})
        elif not any(_label(label, rate) in unsupported for rate in tried):
            raise SettingsError(
                f"No learning rate can be chosen for {label!r}: none of its trainings with "
                f"{', '.join(f'{rate:g}' for rate in tried)} finished in every task. Try lower --learning_rates, or "
                "give it one in --scheme_options."
            )
    return study.model_copy(update={"scheme_options": options})


def losses_by_rate(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last validation loss of each training of a `rates_study`, by its label: the mean over tasks.

    A label that diverged or failed in one of its tasks has an infinite loss, so that it is not chosen for being good at
    the easier ones.
    """
    losses: dict[str, list[float]] = {}
    for run in runs:
        curve = run.get("curve", {}).get("validation_loss")
        if run.get("status") != UNSUPPORTED:
            losses.setdefault(run["scheme"], []).append(curve[-1] if curve else math.inf)
    return {label: fmean(found) for label, found in losses.items()}


def _chosen_for(study: StudySettings) -> list[str]:
    return [
        label
        for label in study.schemes
        if (asked := _asked(study, label)).start is None and "learning_rate" not in asked.training
    ]


def _asked(study: StudySettings, label: str) -> SchemeOptions:
    return study.scheme_options.get(label, SchemeOptions())


def _label(label: str, rate: float) -> str:
    return f"{label}-{rate:g}"
