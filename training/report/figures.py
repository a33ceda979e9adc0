"""The figures of a study, with one line per scheme and its interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hf_posenc.plots.curves import Curve, draw_curves, mark_level, name_lines, ticks_at
from hf_posenc.plots.style import png_of, shade, titled_figure
from hf_posenc.report import Result
from training.report.records import ROUNDING
from training.report.results import Study, Task

#: The upper end of a figure of losses, as a multiple of the loss that token frequencies give.
_CEILING = 1.6
#: The height of an exact zero on the logarithmic axis of the dog distance.
_DOG_FLOOR = 1e-8


class StudyFigure(NamedTuple):
    """A figure of a task: its file name, its title, how to read it, and the PNG for light and dark pages."""

    task: str
    name: str
    title: str
    reading: str
    png: bytes
    dark_png: bytes


class _Lines(NamedTuple):
    """The contents of a figure: a quantity over a key of `Record.at`, and how to read it."""

    name: str
    title: str
    quantity: str
    key: str
    y_label: str
    reading: str


_LOWER = "Lower is better."
_FLAT = "A line that stays flat to the right of the dotted line keeps what it learned on texts longer than in training."
_COSINE = "1 means the same embeddings as before the swap."
_DRAWN = (
    _Lines("loss_curves", "Loss on held-out text while training", "validation_loss", "step", "loss (nats per token)",
           f"{_LOWER} A line that falls earlier learns faster. The text is another part of the held-out text than that "
           "of the tables, so the last points are not exactly the losses there."),
    _Lines("similarity_curves", "Cosine while training", "validation_similarity", "step", "mean cosine", _COSINE),
    _Lines("accuracy_curves", "Right answers on held-out pictures while training", "validation_accuracy", "step",
           "share of right answers", "Higher is better."),
    _Lines("accuracy_by_resolution", "Share of pictures that are classified right, by resolution", "accuracy",
           "resolution", "share of right answers",
           "Higher is better. All models were trained at the resolution of the dotted line, and read the same pictures "
           "at the others."),
    _Lines("loss_by_length", "Loss by length of the text", "loss", "length", "loss (nats per token)",
           f"{_LOWER} {_FLAT}"),
    _Lines("tail_loss_by_length", "Loss of the last {tail} tokens by length", "tail_loss", "length",
           "loss of the last {tail} tokens (nats per token)",
           f"{_LOWER} The same last tokens at every length, with more and more text before them. {_FLAT}"),
    _Lines("swapped_loss_by_length", "Loss right after the swap", "before_loss", "length", "loss (nats per token)",
           f"{_LOWER} Before any training with the new scheme."),
    _Lines("similarity_by_length", "Cosine by length of the text", "similarity", "length",
           "cosine to the embeddings before", _COSINE),
    _Lines("exact_match", "Share of answers that are right, by length", "accuracy", "length", "share of right answers",
           f"Higher is better. {_FLAT}"),
    _Lines("loss_by_position", "Loss by position in the longest text", "position_loss", "position",
           "loss (nats per token)", f"{_LOWER} {_FLAT}"),
    _Lines("dog_distance", "The two dogs, layer by layer", "dog_distance", "layer", "distance between the two dogs",
           "How different the model's two vectors for 'dog' in 'The dog chased another dog' are. In the shaded part "
           "they are the same up to rounding: the model cannot tell the two dogs apart."),
)  # fmt: skip
_SAME = "Lines that coincide are drawn once, with all their names."
_BAND = "A band is the 95 % interval over seeds."
_X_LABELS = {
    "step": "training step", "layer": "layer (0: embeddings)",
    "length": "length of the text in tokens (dotted: trained on {})",
    "task": "length of the task (dotted: trained on {})",
    "resolution": "pixels along each side (dotted: trained on {})",
    "position": "position in tokens (dotted: trained on {})",
}  # fmt: skip


def draw_figures(study: Study, records: Mapping[str, Result]) -> list[StudyFigure]:
    """Draws every figure that the finished runs have data for, task by task."""
    labels = list(dict.fromkeys(run.scheme for run in study.runs))
    figures = []
    for name, result in records.items():
        for lines in _DRAWN:
            for prefix, chosen in _groups(study, name):
                task, further = study.tasks[name], ", models that start from a trained one" if prefix else ""
                title, y_label = (text.format(tail=task.tail_tokens) for text in (lines.title + further, lines.y_label))
                titled = lines._replace(title=title, y_label=y_label)
                light, dark = (_draw(task, result, titled, chosen, labels, on_dark) for on_dark in (False, True))
                if light is not None and dark is not None:
                    spread = any(record.low is not None for record in result.of(quantity=lines.quantity))
                    reading = " ".join([lines.reading, _SAME, *([_BAND] * (spread and lines.key != "layer"))])
                    figures.append(StudyFigure(name, f"{name}_{prefix}{lines.name}", title, reading, light, dark))
    return figures


def _groups(study: Study, task: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the schemes of each figure: those without a start; those that start from others, and their starts."""
    started = {run.scheme: run.start for run in study.of(task)}
    yield "", [label for label, start in started.items() if start is None]
    if any(started.values()):
        yield "further_", [label for label, start in started.items() if start or label in started.values()]


def _draw(task: Task, result: Result, lines: _Lines, chosen: list[str], labels: list[str], dark: bool) -> bytes | None:
    curves = {label: curve for label in chosen if (curve := _curve(result, label, lines)) is not None}
    if not curves:
        return None
    with titled_figure(
        f"{lines.title}\n{result.title}", (5.8, max(4.0, 1.1 + 0.21 * len(chosen))), dark=dark
    ) as figure:
        axes = figure.add_subplot()
        trained = " to ".join(map(str, dict.fromkeys((min(task.trained), max(task.trained)))))
        label = _X_LABELS["task" if (lines.quantity, lines.key) == ("accuracy", "length") else lines.key]
        axes.set(xlabel=label.format(trained), ylabel=lines.y_label)
        if lines.key == "layer":
            axes.set_yscale("log")
            axes.locator_params(axis="x", integer=True)
            axes.set_yticks([1, 1e-2, 1e-4, 1e-6, _DOG_FLOOR], ["1", "0.01", "0.0001", "1e-6", "0"])
            axes.minorticks_off()
            axes.axhspan(_DOG_FLOOR / 2, ROUNDING, color=shade(0.08), zorder=0, linewidth=0)
        elif lines.key == "resolution":
            ticks_at(axes, task.lengths)
        elif lines.quantity == "accuracy":
            axes.set_ylim(-0.02, 1.02)
        elif lines.key == "length":
            axes.set_xscale("log", base=2)
            ticks_at(axes, task.lengths)
        if lines.key in ("length", "position", "resolution"):
            axes.axvline(max(task.trained), color=shade(0.5), linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
        frequencies = ("loss" in lines.quantity and task.unigram_cross_entropy) or math.inf
        draw_curves(axes, curves, labels, _DOG_FLOOR if lines.key == "layer" else -math.inf, _CEILING * frequencies)
        if frequencies < math.inf:
            mark_level(axes, frequencies, "token frequencies alone")
            axes.set_ylim(top=min(axes.get_ylim()[1], _CEILING * frequencies))
        name_lines(axes)
        return png_of(figure, dpi=120, colors=64)


def _curve(result: Result, label: str, lines: _Lines) -> Curve | None:
    """Returns the line of a scheme with its interval; `None` if it has none."""
    records = [point for point in result.of(label, lines.quantity) if point.value is not None and lines.key in point.at]
    if not records or (lines.key == "step" and len(records) == 1):
        return None
    points = ((point.at[lines.key], point.value, point.low, point.high) for point in records)
    x, mean, low, high = zip(*points, strict=True)
    # A logarithmic axis cannot show a lower end at or below zero.
    return Curve(x, mean) if lines.key == "layer" else Curve(x, mean, low, high)
