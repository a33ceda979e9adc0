"""The results of a study as records: one `Result` per task. Every number is a mean over seeds with its interval."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from scipy.stats import t as student_t

from hf_posenc.metrics.dog import PROBE_TOLERANCE
from hf_posenc.report import Quantity, Record, Result, Subject, View
from hf_posenc.schemes.registry import scheme_from_dict
from training.report.results import BY_LENGTH, MAIN, Run, Study, Task

CONFIDENCE = 0.95
#: A distance of the two dogs up to this is a rounding error of float32.
ROUNDING = 1e-5
#: No perplexity is shown for a loss above this. It would have dozens of digits.
LARGEST_LOSS = 50.0

_CURVES = ("train_loss", "validation_loss", "validation_similarity", "validation_accuracy")

_MEASURED = {
    "language_modeling": "The same held-out text at every length. Losses in nats per token.",
    "generalization": "Percent of examples of each length with every token of the answer right (exact match).",
    "image_classification": "Percent of the same held-out pictures, at every resolution, that are classified right.",
    "embedding": "Cosines to the sentence embeddings of the model before the swap; where that model cannot read a text "
    "as a whole, to the mean over pieces that it can read.",
}


def study_records(study: Study) -> dict[str, Result]:
    """Returns one result for each task that has runs, in the order of the study."""
    return {name: _result(study, name) for name in study.tasks if study.of(name)}


def _result(study: Study, name: str) -> Result:
    task, runs = study.tasks[name], study.of(name)
    finished = [run for run in runs if run.finished]
    timed = all(run.cpu_seconds is not None for run in finished)
    clock = "processor" if timed and not study.machine.get("gpu") else "wall"
    # If there are several unpatched models, the control is the first one with new weights.
    unpatched = sorted((run for run in finished if run.config is None), key=lambda run: run.start is not None)
    control = unpatched[0].scheme if unpatched else None
    frame = _frame(finished, task, clock, control)
    labels = list(dict.fromkeys(run.scheme for run in runs))
    return Result(
        task=name,
        title=f"{name}: {task.model}" + (f" ({task.pretrained})" if task.pretrained else ""),
        quantities=_quantities(task, clock, control),
        subjects=tuple(_subject(label, study.of(name, label), task) for label in labels),
        records=tuple(record for label in labels for record in _records(label, study.of(name, label), frame)),
        views=_views(task, frame),
        settings={"command": study.command, "task": task.model_dump(), "control": control, "versions": study.versions},
        remarks=tuple(_remarks(task, frame, finished, study.corpus or {})),
    )


def _subject(label: str, runs: list[Run], task: Task) -> Subject:
    """Returns a scheme, with a note on how it differs from its label and the settings of its task."""
    first, finished = runs[0], [run for run in runs if run.finished]
    scheme = "the unpatched model" if first.config is None else f"`{scheme_from_dict(first.config).label}`"
    about = [] if scheme == f"`{label}`" else [scheme]
    about += [f"from the trained `{first.start}` of the same seed"] if first.start else []
    steps = finished[0].steps if finished else None
    about += [f"{steps:,} steps"] if steps is not None and (first.start or steps != task.max_steps) else []
    options = first.training | first.swap_options
    about += [f"{name}={value}" for name, value in options.items() if name != "max_steps"]
    notes = [", ".join(about)] if about else []
    ends: dict[str, list[str]] = {}
    for run in runs:
        if not run.finished:
            ends.setdefault(f"{run.status}: {run.reason}", []).append(str(run.seed))
    notes += [f"seed {', '.join(seeds)} {end}" for end, seeds in ends.items()]
    name = "native" if first.config is None else first.config["scheme"]
    trained = max(task.trained)
    if name == "learned" and finished and not first.start and task.axis == "length" and task.lengths[-1] > trained:
        notes += [f"no text in training was long enough for its vectors of positions from {trained}"]
    notes += [note for run in finished for note in (*run.notes, *run.reading.get("reasons", ()))]
    notes += [f"dog test: {run.dog['error']}" for run in finished if run.dog and run.dog.get("error")]
    lines = [f"`{label}`: {note.rstrip('.')}." for note in dict.fromkeys(notes)]
    return Subject(label, name, first.config, (" ".join(lines),) if lines else ())


# From runs to numbers


def _frame(finished: list[Run], task: Task, clock: str, control: str | None) -> pd.DataFrame:
    """Returns one row per number of a run, with the columns scheme, seed, quantity, key, at and value."""
    rows = [(run.scheme, run.seed, *number) for run in finished for number in _numbers(run, task, clock)]
    columns = ["scheme", "seed", "quantity", "key", "at", "value"]
    frame = pd.DataFrame(rows, columns=columns).astype({"value": float})
    compared = [frame]
    for quantity, name in ((MAIN[task.kind], "difference"), ("healed", "to_control")):
        values = frame[frame.quantity == quantity]
        pairs = values.merge(values[values.scheme == control], on=["seed", "key", "at"], suffixes=("", "_control"))
        pairs = pairs[pairs.scheme != control].assign(quantity=name)
        compared.append(pairs.assign(value=pairs.value - pairs.value_control)[columns])
    return pd.concat(compared, ignore_index=True)


def _numbers(run: Run, task: Task, clock: str) -> Iterator[tuple[str, str, Any, float | None]]:
    """Yields the numbers of a run: quantity, key of `Record.at` and its value, number."""
    steps = run.curve["step"]
    for quantity, values in run.curve.items():
        if quantity != "step" and values:
            yield from ((quantity, "step", step, value) for step, value in zip(steps, values, strict=True))
    if task.pretrained:
        points = run.curve.get("validation_loss") or run.curve["validation_similarity"]
        yield "swapped", "", 0, points[0] if steps[0] == 0 else None
        yield "healed", "", 0, points[-1]
    for prefix, reading in (("", run.reading), ("before_", run.before or {})):
        for quantity in BY_LENGTH:
            for length, value in zip(reading["lengths"], reading[quantity], strict=True) if quantity in reading else ():
                yield prefix + quantity, task.axis, length, value
                if quantity == "loss" and task.axis == "length":
                    known = value is not None and value <= LARGEST_LOSS
                    yield f"{prefix}perplexity", "length", length, math.exp(value) if known else None
    if run.reading.get("sliding_loss") is not None:
        yield "sliding_loss", "length", task.lengths[-1], run.reading["sliding_loss"]
    edges = itertools.pairwise(run.reading.get("position_edges", ()))
    for (start, stop), value in zip(edges, run.reading.get("position_loss", ()), strict=True):
        yield "position_loss", "position", (start + stop) / 2, value
    dog = run.dog or {}
    yield from (("dog_distance", "layer", layer, value) for layer, value in enumerate(dog.get("layers", ())))
    if dog.get("probe") is not None:
        yield "dog_probe", "", 0, dog["probe"]
    residuals = [fit["residual"] for fit in (run.swap or {}).get("fits", ()) if fit["residual"] is not None]
    if residuals:
        yield "residual", "", 0, max(residuals)
    seconds = run.seconds if clock == "wall" else run.cpu_seconds
    yield "seconds", "", 0, seconds / run.steps if run.steps and seconds else None


# From numbers to records


def half_width(values: Sequence[float]) -> float | None:
    """Returns half of Student's interval of a mean; `None` for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    return float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1)) * stdev(values) / math.sqrt(count)


def _records(label: str, runs: list[Run], frame: pd.DataFrame) -> Iterator[Record]:
    of_scheme = frame[frame.scheme == label]
    for (quantity, key, at), values in of_scheme.groupby(["quantity", "key", "at"], sort=False).value:
        present = values.dropna().tolist()
        count, half = len(present), half_width(present)
        # Sums are rounded exactly, so the last digit of a table does not depend on the order of the seeds.
        mean = fmean(present) if count else None
        shown = ""
        if quantity.startswith("dog_") and mean is not None:
            rounding = mean <= (ROUNDING if quantity == "dog_distance" else PROBE_TOLERANCE)
            shown = "0" if rounding else f"{mean:.2g}" + ("" if half is None else f" ± {half:.1g}")
        yield Record(
            label,
            quantity,
            mean,
            {key: int(at) if key != "position" else at} if key else {},
            low=None if mean is None or half is None else mean - half,
            high=None if mean is None or half is None else mean + half,
            count=count,
            note=f"Of {count} of {len(values)} seeds: the others have no number." if 0 < count < len(values) else "",
            shown=shown,
        )
    finished = [run for run in runs if run.finished]
    shown = f"{len(finished)} of {len(runs)}" if len(finished) < len(runs) else ""
    yield Record(label, "seeds", len(finished), shown=shown)
    if finished:
        yield Record(label, "parameters", finished[0].parameters, shown=f"{finished[0].parameters:,}")


# The tables


def _quantities(task: Task, clock: str, control: str | None) -> tuple[Quantity, ...]:
    """Returns the style, the heading and the meaning of every column."""
    trained = max(task.trained)
    dogs = "distance of the two dogs"
    columns: dict[str, tuple[str, ...]] = {
        "loss": (
            "fraction", "loss at {length}",
            "Loss: the mean negative log-likelihood of the held-out tokens, in nats. Lower is better.",
        ),
        "perplexity": (
            "tenths", "perplexity at {length}",
            "Perplexity: exp(loss). A uniform guess among n tokens has a perplexity of n. Lower is better.",
        ),
        "similarity": ("fraction", "cosine at {length}"),
        "accuracy": ("percent", "{length}"),
        "token_accuracy": ("percent", "tokens right at {length} (%)"),
        "tail_loss": (
            "fraction", f"last {task.tail_tokens} of {{length}}",
            f"Loss of the last {task.tail_tokens} tokens of a text: the same tokens at every length, with more and "
            "more text before them.",
        ),
        "sliding_loss": (
            "fraction", f"loss at {{length}}, read {trained} at a time",
            f"Read {trained} at a time: the text is read in overlapping windows of {trained} tokens, the length of "
            "training, so that no position is new.",
        ),
        "swapped": (
            "fraction", "before training",
            "Before and after training: on held-out text before the first and after the last step.",
        ),
        "healed": ("fraction", "after training"),
        "to_control": ("difference", "more than the control"),
        "difference": (
            "percent" if MAIN[task.kind] == "accuracy" else "fraction", "at {length}",
            f"Difference: the value minus that of the control (`{control}`) with the same seed.",
        ),
        "dog_distance": (
            "number", f"{dogs}, last layer",
            "The two dogs: the distance between the model's vectors for the two occurrences of 'dog' in 'The dog "
            "chased another dog', relative to their norm. At 0 the model cannot distinguish them. A causal mask alone "
            "makes them differ. The column without a mask is therefore the distance after one random attention layer "
            "without a mask, which reads the model's embeddings. There, only whether it is 0 matters: its size depends "
            "on how large the numbers of a scheme are, and later layers may make it larger.",
        ),
        "dog_probe": ("number", f"{dogs}, no mask"),
        "residual": (
            "percent", "old effect missed (%)",
            "Old effect missed: the share of the old scheme's effect that the initialization of the new one misses.",
        ),
        "seeds": ("count", "seeds"),
        "parameters": ("count", "parameters"),
        "seconds": ("milliseconds", f"{'' if clock == 'wall' else 'processor '}time per step (ms)"),
        "position_loss": ("fraction", "position {position}"),
    }  # fmt: skip
    if task.kind == "image_classification":
        columns |= {
            "accuracy": ("percent_tenths", "{resolution} pixels (%)"),
            "loss": ("fraction", "loss at {resolution}"),
            "difference": ("percent_tenths", *columns["difference"][1:]),
            "dog_distance": (
                "number", f"{dogs}, last layer",
                "The two dogs: the distance between the model's vectors of two equal dogs in one picture, relative to "
                "their norm. At 0 the model cannot distinguish them.",
            ),
        }  # fmt: skip
    columns |= {f"before_{name}": (columns[name][0], "right after the swap, {length}") for name in list(columns)[:5]}
    columns |= {name: ("fraction", f"{name} {{step}}") for name in _CURVES}
    return tuple(
        Quantity(name, heading.replace("{length}", f"{{{task.axis}}}"), "".join(meaning), style)
        for name, (style, heading, *meaning) in columns.items()
    )


def _views(task: Task, frame: pd.DataFrame) -> tuple[View, ...]:
    main, known = MAIN[task.kind], set(frame.dropna().quantity)
    layers = frame[frame.quantity == "dog_distance"]["at"]
    last = {task.axis: [task.lengths[-1]], "layer": [int(layers.max()) if len(layers) else 0]}
    by = task.axis
    tables: dict[str, tuple[str, ...]] = {
        "While training, on held-out text": ("swapped", "healed", "to_control"),
        f"{main.capitalize()} by {by}": (f"before_{main}", main),
        **({"Loss by resolution": ("loss",)} if by == "resolution" else {}),
        "Perplexity by length": ("before_perplexity", "perplexity"),
        f"The last {task.tail_tokens} tokens": ("tail_loss",),
        "Difference from the control": ("difference",),
        "Other measures": (
            "sliding_loss",
            "token_accuracy",
            "dog_distance",
            "dog_probe",
            "residual",
            "parameters",
            "seconds",
        ),
    }
    views: list[View] = []
    for title, names in tables.items():
        if known & set(names):
            start = () if views else ("seeds",)
            chosen = tuple(name for name in names if name in known or name == "parameters")
            shown = last if title == "Other measures" else {}
            views.append(View((*start, *chosen), title, shown=shown, half_widths=True))
    return tuple(views) or (View(("seeds",)),)


def _remarks(task: Task, frame: pd.DataFrame, finished: list[Run], corpus: dict[str, Any]) -> Iterator[str]:
    lengths = ", ".join(map(str, task.trained))
    if task.pictures is not None:
        read = f"pictures of {task.pictures['source']}, at {lengths} pixels along each side"
    else:
        read = f"sequences, on lengths of {lengths}"
    alike = [run.training for run in finished if run.start is None and "train_length" not in run.training]
    asked = {training.get("max_steps", task.max_steps) for training in alike}
    steps = asked.pop() if len(asked) == 1 else task.max_steps
    yield f"Trained for {steps:,} steps of {task.batch_size} {read}. {_MEASURED[task.kind]}"
    if task.pictures is not None:
        parts = ", ".join(f"{task.pictures[f'{part}_pictures']:,}" for part in ("train", "validation", "test"))
        yield f"Pictures to train on, for the curves, and for the accuracy by resolution: {parts}."
    if task.unigram_cross_entropy is not None:
        tokens = "Tokens are bytes. " * (corpus.get("tokenizer") == "ByT5Tokenizer")
        alone = f"would have a loss of {task.unigram_cross_entropy:.3f} nats per token"
        yield f"{tokens}A model that knows how often each token occurs, and nothing about its context, {alone}."
    if frame.groupby("scheme").seed.nunique().max() > 1:
        yield (
            "Means over the finished seeds, ± half of the 95 % interval of the mean (Student's t over seeds); a number "
            "without ± has one seed."
        )
