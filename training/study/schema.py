"""What `results.json` of a study has to look like before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LANGUAGE_MODELING = "language_modeling"
GENERALIZATION = "generalization"

FINISHED = "finished"
STATUSES = (FINISHED, "unsupported", "diverged", "failed")

_STUDY_KEYS = ("name", "settings", "command", "corpus", "tasks", "runs", "versions", "machine")
_TASK_KEYS = {
    LANGUAGE_MODELING: (
        "objective", "model", "train_length", "lengths", "tail_tokens", "max_steps", "batch_size",
        "unigram_cross_entropy",
    ),
    GENERALIZATION: ("model", "train_lengths", "lengths", "samples", "max_steps", "batch_size"),
}  # fmt: skip
_RUN_KEYS = ("task", "scheme", "config", "seed", "status")
_FINISHED_KEYS = ("notes", "parameters", "seconds", "cpu_seconds", "curve", "model")
_CORPUS_KEYS = (
    "source", "train_documents", "validation_documents", "train_tokens", "validation_tokens", "digest",
)  # fmt: skip
_CURVE_KEYS = ("step", "train_loss", "validation_loss")
_BY_LENGTH_KEYS = ("lengths", "loss", "tail_loss", "sliding_loss", "position_edges", "position_loss")
_EXACT_MATCH_KEYS = ("lengths", "accuracy", "token_accuracy")


class ResultsError(ValueError):
    """Results of a study that cannot be reported: a missing key, an unknown status, figures that do not fit."""


def check_results(results: dict[str, Any]) -> None:
    """Refuses results that would otherwise be reported wrongly.

    Raises:
        ResultsError: with the place and what is expected there.
    """
    _require(results, _STUDY_KEYS, "The results")
    if results["corpus"] is not None:
        _require(results["corpus"], _CORPUS_KEYS, "The corpus")
    for name, task in results["tasks"].items():
        _check_task(name, task)
    seen: set[tuple[str, str, int]] = set()
    for index, run in enumerate(results["runs"]):
        _require(run, _RUN_KEYS, f"runs[{index}]")
        key = (run["task"], run["scheme"], run["seed"])
        if key in seen:
            raise ResultsError(
                f"runs[{index}] is a second run of {run_place(run)}; the intervals would count it twice."
            )
        seen.add(key)
        _check_run(run, results["tasks"])


def run_place(run: dict[str, Any]) -> str:
    """A run in words, for messages: "task 'causal', scheme 'rope', seed 0"."""
    return f"task {run['task']!r}, scheme {run['scheme']!r}, seed {run['seed']}"


def _check_task(name: str, task: dict[str, Any]) -> None:
    place = f"The task {name!r}"
    _require(task, ("kind",), place)
    if task["kind"] not in _TASK_KEYS:
        raise ResultsError(f"{place} has the kind {task['kind']!r}; known: {', '.join(_TASK_KEYS)}.")
    _require(task, _TASK_KEYS[task["kind"]], place)
    if not task["lengths"]:
        raise ResultsError(f"{place} has no lengths.")
    if task["kind"] == LANGUAGE_MODELING and task["objective"] not in ("causal", "masked"):
        raise ResultsError(f"{place} has the objective {task['objective']!r}; known: causal, masked.")


def _check_run(run: dict[str, Any], tasks: dict[str, Any]) -> None:
    place = f"The run of {run_place(run)}"
    if run["task"] not in tasks:
        raise ResultsError(f"{place} is of a task that the results do not describe; described: {', '.join(tasks)}.")
    if run["status"] not in STATUSES:
        raise ResultsError(f"{place} has the status {run['status']!r}; known: {', '.join(STATUSES)}.")
    config = run["config"]
    if config is not None and not (isinstance(config, dict) and isinstance(config.get("scheme"), str)):
        raise ResultsError(
            f"{place} has the config {config!r}: expected a dictionary with the key 'scheme', or null for the "
            "unpatched model."
        )
    if run["status"] != FINISHED:
        _require(run, ("reason",), place)
        return
    _require(run, _FINISHED_KEYS, place)
    _require(run["curve"], _CURVE_KEYS, f"{place}: its curve")
    # A model that is only read, not trained, has a validation loss and no training loss.
    curve_keys = [key for key in _CURVE_KEYS if run["curve"][key] or key != "train_loss"]
    _same_length(run["curve"], curve_keys, f"{place}: its curve")
    if not run["curve"]["step"]:
        raise ResultsError(f"{place}: its curve has no point; a finished run has one at its last step.")
    task = tasks[run["task"]]
    if task["kind"] == LANGUAGE_MODELING:
        _require(run, ("by_length", "dog"), place)
        _check_by_length(run["by_length"], task, f"{place}: its by_length")
    else:
        _require(run, ("exact_match",), place)
        _require(run["exact_match"], _EXACT_MATCH_KEYS, f"{place}: its exact_match")
        _same_length(run["exact_match"], _EXACT_MATCH_KEYS, f"{place}: its exact_match")
        _same_lengths(run["exact_match"], task, place)
    if "dog" in run and "error" not in run["dog"]:
        _require(run["dog"], ("layers", "probe", "told_apart"), f"{place}: its dog test")


def _check_by_length(by_length: dict[str, Any], task: dict[str, Any], place: str) -> None:
    _require(by_length, _BY_LENGTH_KEYS, place)
    _same_lengths(by_length, task, place)
    _same_length(by_length, ("lengths", "loss", "tail_loss"), place)
    if not isinstance(by_length["sliding_loss"], float | int | None):
        raise ResultsError(f"{place} has the sliding_loss {by_length['sliding_loss']!r}; expected one number or null.")
    edges, losses = len(by_length["position_edges"]), len(by_length["position_loss"])
    if losses and edges != losses + 1:
        raise ResultsError(f"{place} has {losses} losses by position between {edges} edges; expected {losses + 1}.")


def _same_lengths(measured: dict[str, Any], task: dict[str, Any], place: str) -> None:
    if list(measured["lengths"]) != list(task["lengths"]):
        raise ResultsError(f"{place} was measured at {measured['lengths']}, but the task has {task['lengths']}.")


def _same_length(entry: dict[str, Any], keys: Iterable[str], place: str) -> None:
    sizes = {key: len(entry[key]) for key in keys}
    if len(set(sizes.values())) > 1:
        raise ResultsError(f"{place} has lists of different lengths: {sizes}.")


def _require(entry: Any, keys: Iterable[str], place: str) -> None:
    if not isinstance(entry, dict):
        raise ResultsError(f"{place}: expected a dictionary, found {type(entry).__name__}.")
    missing = [key for key in keys if key not in entry]
    if missing:
        raise ResultsError(f"{place}: missing {', '.join(map(repr, missing))}; it has {', '.join(sorted(entry))}.")
