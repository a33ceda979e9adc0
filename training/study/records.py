"""The results of a study as records: one `Result` per task, every number a mean over seeds with its interval."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from scipy.stats import t as student_t

from hf_posenc.metrics.dog import PROBE_TOLERANCE
from hf_posenc.report import Quantity, Record, Result, Subject, View
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.registry import scheme_from_dict
from training.study.results import Finished, Reading, ResultsError, Study, Task, Unfinished
from training.study.wording import fit_note, start_notes, task_text, task_title, unfinished_lines

CONFIDENCE = 0.95
#: A distance of the two dogs up to this one is rounding of float32.
ROUNDING = 1e-5
#: A loss above this one has no perplexity, which would be a number of dozens of digits.
LARGEST_LOSS = 50.0
#: Settings that make a step longer or shorter: with other ones than its task, a training has no price beside it.
_STEP_SETTINGS = {"train_length", "train_lengths", "batch_size", "hidden_size", "num_layers", "num_heads"}

#: What a model is compared by, and how it is written, by the kind of its task.
MAIN = {"language_modeling": "loss", "generalization": "accuracy", "embedding": "similarity"}


def study_records(study: Study) -> dict[str, Result]:
    """One result per task that has runs, in the order of the study.

    Raises:
        ResultsError: for runs of one scheme that differ in more than the seed.
    """
    names = [name for name in study.tasks if any(run.task == name for run in study.runs)]
    return {name: _result(study, name) for name in names}


def clock(study: Study) -> str:
    """What times count: "processor", or "wall" where a GPU did the work or processor time is not known."""
    known = all(run.cpu_seconds is not None for run in study.runs if isinstance(run, Finished))
    return "processor" if known and not study.machine.get("gpu") else "wall"


def _result(study: Study, name: str) -> Result:
    task = study.tasks[name]
    runs = [run for run in study.runs if run.task == name]
    groups = {label: [run for run in runs if run.scheme == label] for label in dict.fromkeys(r.scheme for r in runs)}
    for group in groups.values():
        _check_alike(group)
    finished = study.finished(name)
    control = control_label(finished)
    frame = _frame(finished, task, clock(study), control)
    records = [record for label in groups for record in _records(label, frame)]
    records += [record for label, group in groups.items() for record in _counts(label, group)]
    return Result(
        task=name,
        title=task_title(name, task),
        quantities=_quantities(task, clock(study), control),
        subjects=tuple(_subject(label, group, task) for label, group in groups.items()),
        records=tuple(records),
        views=tuple(_views(task, frame)),
        settings={
            "command": study.command,
            "task": task.model_dump(),
            "control": control,
            "clock": clock(study),
            "price_reference": _price_reference(finished, control, frame),
            "versions": study.versions,
        },
        remarks=tuple(_remarks(task, frame, finished)),
    )


def control_label(finished: list[Finished]) -> str | None:
    """The first unpatched model, one that began from new weights before one that did not."""
    unpatched = sorted((run for run in finished if run.config is None), key=lambda run: run.start is not None)
    return unpatched[0].scheme if unpatched else None


def _check_alike(runs: list[Finished | Unfinished]) -> None:
    """Runs that differ in more than the seed must not be averaged."""
    finished = [run for run in runs if isinstance(run, Finished)]
    for among, parts in (
        (runs, {"config": "config", "start": "start", "training settings": "training", "swap": "swap_options"}),
        (finished, {"number of parameters": "parameters", "evaluated steps": "curve.step"}),
    ):
        for what, path in parts.items():
            found = [_follow(run, path) for run in among]
            for run, value in zip(among, found, strict=True):
                if value != found[0]:
                    raise ResultsError(
                        f"The runs of task {run.task!r}, scheme {run.scheme!r} with seeds {among[0].seed} and "
                        f"{run.seed} differ in their {what}: {found[0]!r} and {value!r}. They cannot be averaged; give "
                        "them different labels, or run them again with the same settings."
                    )


def _follow(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value


# From runs to numbers


def _frame(finished: list[Finished], task: Task, time: str, control: str | None) -> pd.DataFrame:
    """One row per number of a run, with the columns scheme, seed, quantity, key, at and value."""
    columns = ["scheme", "seed", "quantity", "key", "at", "value"]
    rows = [(run.scheme, run.seed, *number) for run in finished for number in _numbers(run, task, time)]
    frame = pd.DataFrame(rows, columns=columns).astype({"value": float})
    compared = [frame]
    if control is not None:
        compared.append(_beside(frame, control, MAIN[task.kind], "difference", "difference"))
        compared.append(_beside(frame, control, "healed", "to_control", "difference"))
    reference = _price_reference(finished, control, frame)
    if reference is not None:
        alike = [run.scheme for run in finished if not _STEP_SETTINGS & set(run.training)]
        priced = _beside(frame, reference, "seconds", "price", "ratio", with_itself=True)
        compared.append(priced[priced.scheme.isin(alike)])
    return pd.concat(compared, ignore_index=True)


def _beside(
    frame: pd.DataFrame, other: str, quantity: str, name: str, how: str, with_itself: bool = False
) -> pd.DataFrame:
    """A quantity less that of another scheme with the same seed, or divided by it."""
    found = frame[frame.quantity == quantity]
    pairs = found.merge(found[found.scheme == other], on=["seed", "key", "at"], suffixes=("", "_other"))
    pairs = pairs if with_itself else pairs[pairs.scheme != other]
    value = pairs.value / pairs.value_other if how == "ratio" else pairs.value - pairs.value_other
    return pairs[["scheme", "seed", "key", "at"]].assign(quantity=name, value=value)


def _price_reference(finished: list[Finished], control: str | None, frame: pd.DataFrame) -> str | None:
    timed = set(frame[frame.quantity == "seconds"].dropna().scheme)
    without = [run.scheme for run in finished if run.config is not None and run.config["scheme"] == "none"]
    return next((label for label in [*without, control] if label in timed), None)


def _numbers(run: Finished, task: Task, time: str) -> Iterator[tuple[str, str, Any, float | None]]:
    """The numbers of a run: quantity, key of `Record.at` and its value, number."""
    for quantity in ("train_loss", "validation_loss", "validation_similarity"):
        for step, value in zip(run.curve.step, getattr(run.curve, quantity), strict=False):
            yield quantity, "step", step, value
    points = run.curve.validation_loss or run.curve.validation_similarity
    if task.pretrained:
        yield "swapped", "", 0, points[0] if run.curve.step[0] == 0 else None
        yield "healed", "", 0, points[-1]
    for prefix, reading in (("", run.reading), ("before_", run.before)):
        if reading is not None:
            yield from ((prefix + quantity, "length", length, value) for quantity, length, value in _by_length(reading))
    if run.reading.sliding_loss is not None:
        yield "sliding_loss", "length", run.reading.lengths[-1], run.reading.sliding_loss
    edges = itertools.pairwise(run.reading.position_edges)
    for (start, stop), value in zip(edges, run.reading.position_loss, strict=True):
        yield "position_loss", "position", (start + stop) / 2, value
    if run.dog is not None:
        for layer, value in enumerate(run.dog.layers):
            yield "dog_distance", "layer", layer, value
        yield "dog_probe", "", 0, run.dog.probe
    seconds = run.seconds if time == "wall" else run.cpu_seconds
    yield "seconds", "", 0, seconds / run.steps if run.steps and seconds else None


def _by_length(reading: Reading) -> Iterator[tuple[str, int, float | None]]:
    for quantity in ("loss", "tail_loss", "similarity", "accuracy", "token_accuracy"):
        for length, value in zip(reading.lengths, getattr(reading, quantity), strict=False):
            yield quantity, length, value
            if quantity == "loss":
                known = value is not None and value <= LARGEST_LOSS
                yield "perplexity", length, math.exp(value) if known and value is not None else None


# From numbers to records


def _records(label: str, frame: pd.DataFrame) -> Iterator[Record]:
    own = frame[frame.scheme == label]
    for (quantity, key, at), values in own.groupby(["quantity", "key", "at"], sort=False).value:
        present = values.dropna().tolist()
        count = len(present)
        # Exactly rounded sums, so that the last digit of a table does not depend on the order of the seeds.
        mean = fmean(present) if count else None
        half = None
        if count > 1:
            quantile = float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1))
            half = quantile * stdev(present) / math.sqrt(count)
        yield Record(
            label,
            quantity,
            mean,
            {key: int(at) if key != "position" else at} if key else {},
            low=None if mean is None or half is None else mean - half,
            high=None if mean is None or half is None else mean + half,
            count=count,
            shown=_distance(quantity, mean, half),
            details={"seeds": len(values)} if count < len(values) else {},
        )


def _distance(quantity: str, mean: float | None, half: float | None) -> str:
    if not quantity.startswith("dog_") or mean is None:
        return ""
    if mean <= (ROUNDING if quantity == "dog_distance" else PROBE_TOLERANCE):
        return "0"
    return f"{mean:.2g}" if half is None else f"{mean:.2g} ± {half:.1g}"


def _counts(label: str, runs: list[Finished | Unfinished]) -> Iterator[Record]:
    finished = [run for run in runs if isinstance(run, Finished)]
    n = len(finished)
    yield Record(label, "seeds", n, shown=str(n) if n == len(runs) else f"{n} of {len(runs)}")
    if finished:
        yield Record(label, "parameters", finished[0].parameters, shown=f"{finished[0].parameters:,}")


def _subject(label: str, runs: list[Finished | Unfinished], task: Task) -> Subject:
    finished = [run for run in runs if isinstance(run, Finished)]
    first = runs[0]
    text = "the unpatched model" if first.config is None else scheme_label(scheme_from_dict(first.config))
    notes = [] if text == label else [f"`{label}` is {text if first.config is None else f'`{text}`'}."]
    notes += start_notes(label, first, finished, task)
    notes += [f"`{label}`, {line}" for line in unfinished_lines(runs)]
    notes += [f"`{label}`: {note}" for run in finished for note in (*run.notes, *run.reading.reasons)]
    notes += [f"`{label}`: {note}" for note in fit_note(finished)]
    notes += [f"`{label}`, dog test: {run.dog.error}" for run in finished if run.dog and run.dog.error]
    readings = [run.reading for run in finished]
    missing = any(None in (*found.loss, *found.tail_loss, *found.accuracy, *found.similarity) for found in readings)
    if missing:
        notes.append(
            f"`{label}`: some figures are of fewer seeds, because a run had no number there (the loss overflowed, or "
            "the length was refused)."
        )
    name = "native" if first.config is None else first.config["scheme"]
    return Subject(label, name, first.config, (" ".join(dict.fromkeys(notes)),) if notes else ())


# The tables


def _quantities(task: Task, time: str, control: str | None) -> tuple[Quantity, ...]:
    tail, style = task.tail_tokens, "percent" if task.kind == "generalization" else "fraction"
    better = "below zero is better" if task.kind == "language_modeling" else "above zero is better"
    than = f"that of the control (`{control}`) with the same seed: {better}. Where the interval leaves out zero, the "
    than += "difference is more than the seeds' spread."
    return (
        Quantity("seeds", "seeds", style="count"),
        Quantity("loss", "loss at {length}", style="fraction"),
        Quantity("before_loss", "swapped, at {length}", style="fraction"),
        Quantity("perplexity", "perplexity at {length}", style="tenths"),
        Quantity("before_perplexity", "swapped, at {length}", style="tenths"),
        Quantity("similarity", "cosine at {length}", style="fraction"),
        Quantity("before_similarity", "swapped, at {length}", style="fraction"),
        Quantity("accuracy", "{length}", style="percent"),
        Quantity("before_accuracy", "swapped, at {length}", style="percent"),
        Quantity("token_accuracy", "tokens right at {length}", style="percent"),
        Quantity(
            "tail_loss",
            f"last {tail} at {{length}}",
            f"Last {tail}: the same targets at every length, with more and more text before them.",
            style="fraction",
        ),
        Quantity(
            "sliding_loss",
            "sliding at {length}",
            f"Sliding: the text is read in overlapping windows of {task.train_length} tokens, so that no token sees "
            "further back than that and a model never meets a longer input than in training.",
            style="fraction",
        ),
        Quantity("swapped", "first", style="fraction"),
        Quantity("healed", "last", style="fraction"),
        Quantity("to_control", "to the control", style="difference"),
        Quantity("difference", "at {length}", f"Difference: the value less {than}", style=style),
        Quantity("dog_distance", "dogs, last layer", _dog_meaning(task)),
        Quantity("dog_probe", "dogs, probe"),
        Quantity("parameters", "parameters", style="count"),
        Quantity("seconds", f"{'' if time == 'wall' else 'processor '}ms per step", style="milliseconds"),
        Quantity("price", "price", style="number"),
        *(Quantity(name, f"{name} {{step}}") for name in ("train_loss", "validation_loss", "validation_similarity")),
        Quantity("position_loss", "position {position}"),
    )


def _dog_meaning(task: Task) -> str:
    text = "Dogs: distance between the two dogs of 'The dog chased another dog' (relative L2), "
    if task.objective == "masked" or task.kind == "embedding":
        return (
            f"{text}in the model and in random attention over its embeddings (probe). Without positions there is none."
        )
    return (
        f"{text}where the causal mask alone tells them apart, with or without positions; the probe, random attention "
        "without a mask over the model's embeddings, shows what the scheme adds."
    )


def _views(task: Task, frame: pd.DataFrame) -> Iterator[View]:
    known = set(frame.dropna().quantity)
    longest = {"length": [task.lengths[-1]]}

    def view(title: str, names: tuple[str, ...], **shown: Any) -> View | None:
        chosen = tuple(name for name in names if name in known or name in ("seeds", "parameters"))
        return View(chosen, title, shown=shown, half_widths=True) if known & set(chosen) else None

    main = MAIN[task.kind]
    titles = {
        "loss": "Loss by length",
        "accuracy": "Percent of exact matches by length",
        "similarity": "Cosine by length",
    }
    candidates = []
    if task.pretrained:
        candidates.append(view("While training, on held-out text", ("seeds", "swapped", "healed", "to_control")))
        shown = "perplexity" if main == "loss" else main
        candidates.append(view(titles[main].replace("Loss", "Perplexity"), (f"before_{shown}", shown)))
    candidates.append(None if task.pretrained and main != "loss" else view(titles[main], ("seeds", main)))
    if not task.pretrained:
        candidates.append(view("Right after the swap", (f"before_{main}",)))
    candidates.append(view(f"The last {task.tail_tokens} tokens", ("tail_loss",)))
    candidates.append(view("Difference from the control", ("difference",)))
    layers = frame[frame.quantity == "dog_distance"]["at"]
    others = ("sliding_loss", "token_accuracy", "dog_distance", "dog_probe", "parameters", "seconds")
    candidates.append(view("Other measures", others, **longest, layer=[int(layers.max()) if len(layers) else 0]))
    return (found for found in candidates if found is not None) if known else iter([View(("seeds",))])


def _remarks(task: Task, frame: pd.DataFrame, finished: list[Finished]) -> Iterator[str]:
    yield task_text(task)
    if frame.groupby("scheme").seed.nunique().max() > 1:
        yield (
            "Figures are means over the finished seeds, ± half of the 95 % interval of that mean (Student's t over "
            "seeds); a figure without ± has one seed."
        )
        if task.kind == "generalization":
            yield "An interval of a share near 0 or 100 can reach past it."
    if task.pretrained and finished:
        what = (
            "loss (nats per token)" if task.kind == "language_modeling" else "cosine to the embeddings before the swap"
        )
        yield (
            f"First and last: {what} while training, the first one before any step. The control keeps its scheme and "
            "is trained as long on the same batches; its first value is that of the untouched model."
        )
