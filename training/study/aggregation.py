"""Runs of the same scheme with other seeds, as means with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student_t

from training.study.schema import FINISHED, GENERALIZATION, LANGUAGE_MODELING, ResultsError, check_results

CONFIDENCE = 0.95
#: The entry of a run that each clock reads.
_TIMES = {"wall": "seconds", "processor": "cpu_seconds"}

#: Settings that make a step longer or shorter: with other ones than its task, a training has no price beside it.
_STEP_SETTINGS = ("train_length", "train_lengths", "batch_size", "hidden_size", "num_layers", "num_heads")

#: A distance up to this one is rounding of float32.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the interval around it.

    Args:
        mean: of the seeds that have the figure; `None` if none has it.
        half_width: half of the 95 % interval of the mean (Student's t over seeds); `None` below two seeds.
        n: how many seeds have the figure.
    """

    mean: float | None
    half_width: float | None
    n: int


@dataclass(frozen=True)
class Unfinished:
    """A run without figures: its seed, its status and the reason."""

    seed: int
    status: str
    reason: str


@dataclass(frozen=True)
class Aggregate:
    """One scheme in one task, over its seeds.

    What a task does not measure is an empty tuple. Losses are in nats per token, accuracies between 0 and 1, seconds
    per training step.

    Args:
        task: name of the task.
        scheme: the label of the scheme.
        config: the scheme's options; `None` for the unpatched model.
        start: label of the scheme whose trained model this one goes on from; `None` for new weights.
        training: settings of the training that differ from those of the task.
        seeds: those that finished, ascending.
        unfinished: the others.
        notes: what a reader has to know, each once.
        parameters: trained numbers; `None` if no run finished.
        steps: training steps at which the losses were taken.
        train_loss: one estimate per step.
        validation_loss: one estimate per step.
        loss: mean loss, one estimate per length of the task.
        tail_loss: loss of the last tokens, likewise.
        sliding_loss: loss at the longest length read in windows of the trained length; `None` if it
            was not measured.
        position_edges: where the bins of `position_loss` begin and end.
        position_loss: loss in bins of the position at the longest length.
        accuracy: share of exact matches, one estimate per length of the task.
        token_accuracy: share of right tokens, likewise.
        dog_layers: distance of the two dogs, from the embeddings to the last layer.
        dog_probe: the same in random attention without a mask; `None` if the dog test was not run.
        dog_told_apart: of how many seeds the test says that positions tell the dogs apart.
        dog_errors: why the dog test could not be run, each reason once.
        control: label of the unpatched model that it is compared with; `None` if there is none, or this is it.
        difference: loss (or accuracy) less that of the control with the same seed, one estimate per length.
        clock: what `seconds` and `price` count: "processor", which other work on the machine disturbs least, or "wall"
            time where a GPU did the work.
        seconds: per step; no number for a model that was only read.
        price: `seconds` divided by those of `price_reference` with the same seed; `None` where there is no such
            reference, or steps of another size.
        price_reference: label of the scheme without positions, else an unpatched model, else `None`.
    """

    task: str
    scheme: str
    config: dict[str, Any] | None
    start: str | None
    training: dict[str, Any]
    seeds: tuple[int, ...]
    unfinished: tuple[Unfinished, ...]
    notes: tuple[str, ...]
    parameters: int | None
    steps: tuple[int, ...]
    train_loss: tuple[Estimate, ...]
    validation_loss: tuple[Estimate, ...]
    loss: tuple[Estimate, ...]
    tail_loss: tuple[Estimate, ...]
    sliding_loss: Estimate | None
    position_edges: tuple[int, ...]
    position_loss: tuple[Estimate, ...]
    accuracy: tuple[Estimate, ...]
    token_accuracy: tuple[Estimate, ...]
    dog_layers: tuple[Estimate, ...]
    dog_probe: Estimate | None
    dog_told_apart: int
    dog_errors: tuple[str, ...]
    control: str | None
    difference: tuple[Estimate, ...]
    clock: str
    seconds: Estimate
    price: Estimate | None
    price_reference: str | None

    @property
    def n(self) -> int:
        """How many seeds finished."""
        return len(self.seeds)


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean and 95 % interval of figures from different seeds; `None` stands for a figure that is missing."""
    present = [value for value in values if value is not None]
    if not present:
        return Estimate(None, None, 0)
    n = len(present)
    if n == 1:
        return Estimate(present[0], None, 1)
    quantile = float(student_t.ppf((1 + CONFIDENCE) / 2, n - 1))
    return Estimate(fmean(present), quantile * stdev(present) / math.sqrt(n), n)


def aggregate(results: dict[str, Any]) -> list[Aggregate]:
    """One aggregate per task and scheme, in the order in which the results name them.

    Raises:
        ResultsError: for results that `check_results` refuses, or runs of one scheme that do not fit together.
    """
    check_results(results)
    clock = "wall" if results["machine"].get("gpu") else "processor"
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for task in results["tasks"]:
        for run in results["runs"]:
            if run["task"] == task:
                groups.setdefault((task, run["scheme"]), []).append(run)
    return [
        _aggregated(results["tasks"][task], sorted(runs, key=lambda run: run["seed"]), results["runs"], clock)
        for (task, _), runs in groups.items()
    ]


def of_task(aggregates: Sequence[Aggregate], task: str) -> list[Aggregate]:
    """Those of one task."""
    return [item for item in aggregates if item.task == task]


def _aggregated(
    task: dict[str, Any], runs: list[dict[str, Any]], every_run: list[dict[str, Any]], clock: str
) -> Aggregate:
    finished = [run for run in runs if run["status"] == FINISHED]
    _check_alike(runs, finished)
    first = finished[0] if finished else None
    language = task["kind"] == LANGUAGE_MODELING
    dogs = [run["dog"] for run in finished if "dog" in run]
    read = [dog for dog in dogs if "error" not in dog]
    peers = [run for run in every_run if run["task"] == runs[0]["task"] and run["status"] == FINISHED]
    time = _TIMES[clock]
    control, reference = _control(peers, runs[0]["scheme"]), _price_reference(peers, time)

    def over(*path: str) -> tuple[Estimate, ...]:
        return _over_seeds([_follow(run, path) for run in finished])

    return Aggregate(
        task=runs[0]["task"],
        scheme=runs[0]["scheme"],
        config=runs[0]["config"],
        start=runs[0].get("from"),
        training=runs[0].get("training", {}),
        seeds=tuple(run["seed"] for run in finished),
        unfinished=tuple(
            Unfinished(run["seed"], run["status"], run["reason"]) for run in runs if run["status"] != FINISHED
        ),
        notes=tuple(dict.fromkeys(note for run in finished for note in run["notes"])),
        parameters=first["parameters"] if first else None,
        steps=tuple(first["curve"]["step"]) if first else (),
        train_loss=over("curve", "train_loss"),
        validation_loss=over("curve", "validation_loss"),
        loss=over("by_length", "loss") if language else (),
        tail_loss=over("by_length", "tail_loss") if language else (),
        sliding_loss=_sliding(finished) if language else None,
        position_edges=tuple(first["by_length"]["position_edges"]) if first and language else (),
        position_loss=over("by_length", "position_loss") if language else (),
        accuracy=() if language else over("exact_match", "accuracy"),
        token_accuracy=() if language else over("exact_match", "token_accuracy"),
        dog_layers=_over_seeds([dog["layers"] for dog in read]),
        dog_probe=estimate([dog["probe"] for dog in read]) if read else None,
        dog_told_apart=sum(bool(dog["told_apart"]) for dog in read),
        dog_errors=tuple(dict.fromkeys(dog["error"] for dog in dogs if "error" in dog)),
        control=control,
        difference=_over_seeds(_differences(task, finished, peers, control)),
        clock=clock,
        seconds=estimate([_per_step(run, time) for run in finished]),
        price=_ratios(time, finished, peers, reference),
        price_reference=reference,
    )


def _check_alike(runs: list[dict[str, Any]], finished: list[dict[str, Any]]) -> None:
    """Runs that differ in more than the seed must not be averaged."""
    parts: dict[str, tuple[list[dict[str, Any]], Callable[[dict[str, Any]], Any]]] = {
        "config": (runs, lambda run: run["config"]),
        "start": (runs, lambda run: run.get("from")),
        "training settings": (runs, lambda run: run.get("training", {})),
        "number of parameters": (finished, lambda run: run["parameters"]),
        "evaluated steps": (finished, lambda run: run["curve"]["step"]),
        "position edges": (finished, lambda run: run.get("by_length", {}).get("position_edges")),
    }
    for name, (among, read) in parts.items():
        for run in among[1:]:
            if read(run) != read(among[0]):
                raise ResultsError(
                    f"The runs of task {run['task']!r}, scheme {run['scheme']!r} with seeds {among[0]['seed']} and "
                    f"{run['seed']} differ in their {name}: {read(among[0])!r} and {read(run)!r}. They cannot be "
                    "averaged; give them different labels, or run them again with the same settings."
                )


def _over_seeds(rows: Sequence[Sequence[float | None]]) -> tuple[Estimate, ...]:
    if len({len(row) for row in rows}) > 1:
        raise ResultsError(f"Seeds of one scheme have lists of different lengths: {[len(row) for row in rows]}.")
    return tuple(estimate(column) for column in zip(*rows, strict=True))


def _follow(run: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = run
    for key in path:
        value = value[key]
    return value


def _sliding(finished: list[dict[str, Any]]) -> Estimate | None:
    found = estimate([run["by_length"]["sliding_loss"] for run in finished])
    return found if found.n else None


def _control(peers: list[dict[str, Any]], scheme: str) -> str | None:
    """The first unpatched model of the task, one that began from new weights before one that did not."""
    unpatched = sorted((run for run in peers if run["config"] is None), key=lambda run: run.get("from") is not None)
    return str(unpatched[0]["scheme"]) if unpatched and unpatched[0]["scheme"] != scheme else None


def _differences(
    task: dict[str, Any], finished: list[dict[str, Any]], peers: list[dict[str, Any]], control: str | None
) -> list[list[float | None]]:
    path = ("exact_match", "accuracy") if task["kind"] == GENERALIZATION else ("by_length", "loss")
    controls = {run["seed"]: run for run in peers if run["scheme"] == control}
    rows = []
    for run in finished:
        if run["seed"] in controls:
            pairs = zip(_follow(run, path), _follow(controls[run["seed"]], path), strict=True)
            rows.append([None if own is None or other is None else own - other for own, other in pairs])
    return rows


def _per_step(run: dict[str, Any], key: str) -> float | None:
    """Time by the steps of this run itself, which may have been trained longer or shorter than its task."""
    steps = run["curve"]["step"][-1]
    return float(run[key]) / steps if steps and run[key] else None


def _price_reference(peers: list[dict[str, Any]], time: str) -> str | None:
    timed = [run for run in peers if _per_step(run, time)]
    for run in timed:
        if run["config"] is not None and run["config"]["scheme"] == "none":
            return str(run["scheme"])
    return next((str(run["scheme"]) for run in timed if run["config"] is None), None)


def _ratios(
    key: str, finished: list[dict[str, Any]], peers: list[dict[str, Any]], reference: str | None
) -> Estimate | None:
    base = {run["seed"]: _per_step(run, key) for run in peers if run["scheme"] == reference}
    alike = [run for run in finished if not set(_STEP_SETTINGS) & set(run.get("training", {}))]
    pairs = [(_per_step(run, key), base.get(run["seed"])) for run in alike]
    ratios = [own / other for own, other in pairs if own is not None and other is not None]
    return estimate(ratios) if ratios else None
