"""Chooses learning rates in the same way for every scheme, before a study trains with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from training.errors import SettingsError
from training.study.cells import UNSUPPORTED, default_options
from training.study.settings import SchemeOptions, StudySettings, TaskOptions


def rates_study(study: StudySettings) -> StudySettings:
    """Returns the study for choosing rates: every scheme with every rate, with a seed that the study does not use."""
    rates, tasks = study.learning_rates, {}
    for name in study.tasks:
        options = {
            _label(label, rate): _with_rate(study, name, label, rate)
            for label in _chosen_for(study, name)
            for rate in rates
        }
        if options:
            task_options = study.task_options.get(name, TaskOptions())
            changes = {"seeds": None, "schemes": list(options), "scheme_options": options}
            tasks[name] = task_options.model_copy(update=changes)
    if not tasks:
        raise SettingsError(
            "--learning_rates are for schemes with new weights and without their own learning rate, but the study has "
            "none."
        )
    labels = dict.fromkeys(label for task_options in tasks.values() for label in task_options.schemes or ())
    rates_only = study.model_copy(
        update={
            "name": f"{study.name}_rates",
            "description": "Trainings that learning rates are chosen from, with a seed that the study does not use.",
            "output_dir": f"{study.output_dir.rstrip('/')}_rates",
            "learning_rates": [],
            "rate_settings": {},
            "schemes": list(labels),
            "scheme_options": {},
            "tasks": list(tasks),
            "task_options": tasks,
            "rate_seed": None,
            "seeds": [max(study.all_seeds) + 1 if study.rate_seed is None else study.rate_seed],
            "save_models": False,
        }
    )
    rates_only._for_rates = True
    return rates_only


def with_chosen_rates(study: StudySettings, results: dict[str, Any]) -> StudySettings:
    """Returns the study in which each scheme has the rate with the lowest validation loss, chosen per task."""
    task_options = dict(study.task_options)
    losses = losses_by_rate(results["runs"])
    unsupported = {(run["task"], run["scheme"]) for run in results["runs"] if run.get("status") == UNSUPPORTED}
    for task in study.tasks:
        asked = task_options.get(task, TaskOptions())
        options = dict(asked.scheme_options)
        for label in _chosen_for(study, task):
            tried = {rate: losses.get((task, _label(label, rate)), math.inf) for rate in study.learning_rates}
            best = min(tried, key=lambda rate: tried[rate])
            if tried[best] < math.inf:
                chosen = SchemeOptions(training={"learning_rate": best})
                options[label] = options.get(label, SchemeOptions()).changed(chosen)
            elif not any((task, _label(label, rate)) in unsupported for rate in tried):
                raise SettingsError(
                    f"No learning rate can be chosen for {label!r} in the task {task!r}: no training run with "
                    f"{', '.join(f'{rate:g}' for rate in tried)} finished. Try lower --learning_rates, or set one "
                    "in --scheme_options."
                )
        task_options[task] = asked.model_copy(update={"scheme_options": options})
    chosen_study = study.model_copy(update={"task_options": task_options})
    chosen_study._flags = frozenset()  # a flag for the rate may be replaced now
    return chosen_study


def losses_by_rate(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Returns the last validation loss of each training of a `rates_study`, by task and label; infinite if diverged."""
    losses = {}
    for run in runs:
        curve = run.get("curve", {}).get("validation_loss")
        if run.get("status") != UNSUPPORTED:
            losses[run["task"], run["scheme"]] = curve[-1] if curve else math.inf
    return losses


def _chosen_for(study: StudySettings, task: str) -> list[str]:
    if "learning_rate" in (study.task_options.get(task, TaskOptions()).model_extra or {}):
        return []
    return [
        label
        for label in study.labels_of(task)
        if (asked := study.options_of(label, task)).start is None
        and "learning_rate" not in asked.training
        and asked.training.get("max_steps") != 0
    ]


def _with_rate(study: StudySettings, task: str, label: str, rate: float) -> SchemeOptions:
    asked = study.options_of(label, task)
    # A label such as rope-0.001 is not the name of a scheme, and has no default options.
    named = SchemeOptions.model_validate({"scheme": asked.scheme or label, **default_options(label, asked)})
    return named.changed(asked).changed(SchemeOptions(training=study.rate_settings | {"learning_rate": rate}))


def _label(label: str, rate: float) -> str:
    return f"{label}-{rate:g}"
