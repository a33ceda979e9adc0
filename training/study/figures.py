"""The figures of a study: what each shows, in what words it is described, and the files."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.plots.curves import Curve, plot_curves
from hf_posenc.plots.heatmaps import plot_share_map
from hf_posenc.plots.intervals import IntervalSeries, plot_intervals
from hf_posenc.plots.style import save_figure, styled
from training.study.aggregation import ROUNDING, Aggregate, Estimate, of_task
from training.study.schema import LANGUAGE_MODELING
from training.study.summary import curve_summary, price_summary, share_summary, sliding_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A loss above this multiple of what token frequencies give leaves the figure at the top.
_CEILING = 1.6
#: The same for losses while training, which start above that level.
_TRAINING_CEILING = 2.5
#: Where an exact zero is drawn on the logarithmic axis of the dog distance.
_DOG_FLOOR = 1e-8
#: An SVG is kept up to this many bytes; a larger one would weigh more than it shows.
_SVG_LIMIT = 150_000

_BANDS = "Bands: 95 % interval of the mean over seeds."


@dataclass(frozen=True)
class StudyFigure:
    """A figure with its words.

    Args:
        name: of the files, without an ending.
        task: name of the task.
        title: a heading.
        reading: how to read it.
        alternative: what it shows, for those who do not see it.
        figure: the drawing.
    """

    name: str
    task: str
    title: str
    reading: str
    alternative: str
    figure: Figure


def draw_figures(results: dict[str, Any], aggregates: Sequence[Aggregate]) -> list[StudyFigure]:
    """Every figure that the finished runs have data for, task by task."""
    labels = list(dict.fromkeys(run["scheme"] for run in results["runs"]))
    figures = []
    for name, task in results["tasks"].items():
        finished = [item for item in of_task(aggregates, name) if item.n]
        makers = _LANGUAGE if task["kind"] == LANGUAGE_MODELING else _GENERALIZATION
        for make in makers:
            if make in _APART:
                drawn = [make(name, task, [item for item in finished if item.start is None], labels)]
                drawn.append(_further(make(name, task, _started(finished), labels), name))
            else:
                drawn = [make(name, task, finished, labels)]
            figures += [figure for figure in drawn if figure is not None]
    return figures


def _started(aggregates: Sequence[Aggregate]) -> list[Aggregate]:
    """Models that start from a trained one, beside those they start from."""
    starts = {item.start for item in aggregates if item.start is not None}
    return [item for item in aggregates if item.start is not None or item.scheme in starts]


def _further(figure: StudyFigure | None, task: str) -> StudyFigure | None:
    if figure is None:
        return None
    name = figure.name.replace(f"{task}_", f"{task}_further_", 1)
    return dataclasses.replace(figure, name=name, title=f"{figure.title}, models that start from a trained one")


def save_figures(figures: Sequence[StudyFigure], folder: Path) -> list[Path]:
    """Writes each as PNG, and as SVG where that is small. Returns the files."""
    paths = []
    # Text that stays text in an SVG, and names of its parts that do not change, are settings of saving.
    with styled():
        for entry in figures:
            for path in save_figure(entry.figure, folder, entry.name):
                if path.suffix == ".svg" and path.stat().st_size > _SVG_LIMIT:
                    path.unlink()
                else:
                    paths.append(path)
    return paths


def _loss_curves(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    reading = (
        "Loss on held-out data of the trained length, while training. A line that falls earlier learns faster; a flat "
        "stretch is a plateau that the model has not left yet."
    )
    new = [item for item in aggregates if item.start is None]
    return _training_curves(name, task, new, labels, ("loss_curves", "Loss while training"), reading)


def _further_curves(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    reading = (
        "Loss on held-out data of models that start from a trained one, from their first new step on. Where the "
        "position encoding was exchanged, the line shows how fast the model recovers."
    )
    further = [item for item in aggregates if item.start is not None]
    what = ("further_loss_curves", "Loss while training further")
    return _training_curves(name, task, further, labels, what, reading)


def _training_curves(
    name: str,
    task: dict[str, Any],
    aggregates: Sequence[Aggregate],
    labels: list[str],
    what: tuple[str, str],
    reading: str,
) -> StudyFigure | None:
    language = task["kind"] == LANGUAGE_MODELING
    trained = [item for item in aggregates if item.steps[-1] > 0]
    curves = _curves(trained, lambda item: item.steps, lambda item: item.validation_loss)
    if not curves:
        return None
    figure = plot_curves(
        curves,
        labels=labels,
        x_label="training step",
        y_label="validation loss (nats per token)",
        reference=_frequencies(task) if language else None,
        ceiling=_TRAINING_CEILING * task["unigram_cross_entropy"] if language else None,
    )
    return StudyFigure(f"{name}_{what[0]}", name, what[1], f"{reading} {_BANDS}", curve_summary(curves, "step"), figure)


def _loss_by_length(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    return _by_length(
        name, task, aggregates, labels, ("loss_by_length", "Loss by length"), lambda item: item.loss,
        "mean loss (nats per token)",
        "Mean loss over all positions when the same held-out text is read in pieces of each length. A flat or falling "
        "line uses longer context or is at least not harmed by it; a rising line is a model that does not work "
        "beyond its training length. The mean includes the short contexts at the start of every piece, which hide part "
        "of a collapse.",
    )  # fmt: skip


def _tail_loss_by_length(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    tail = task["tail_tokens"]
    return _by_length(
        name, task, aggregates, labels, ("tail_loss_by_length", f"Loss of the last {tail} tokens by length"),
        lambda item: item.tail_loss, f"loss of the last {tail} tokens (nats per token)",
        f"The last {tail} targets are the same at every length, with more and more text before them: what changes "
        "along a line is the effect of the longer context alone.",
    )  # fmt: skip


def _sliding_window(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    measured = [item for item in aggregates if item.sliding_loss is not None]
    if not measured:
        return None
    longest = task["lengths"][-1]
    figure = plot_intervals(
        [item.scheme for item in measured],
        [
            _series("whole context", [item.loss[-1] for item in measured]),
            _series("sliding window", [item.sliding_loss for item in measured]),
        ],
        x_label=f"loss at {longest} tokens (nats per token; dashed: token frequencies)",
        reference=task["unigram_cross_entropy"],
    )
    reading = (
        f"The same text of {longest} tokens, once as a whole, and once in overlapping windows of "
        f"{task['train_length']} tokens, so that the model never meets a longer input than in training. Where the "
        "whole context is worse, the scheme is better off with the window."
    )
    return StudyFigure(
        f"{name}_sliding_window", name, "Whole context or sliding window", reading,
        sliding_summary(measured, longest), figure,
    )  # fmt: skip


def _by_length(
    name: str,
    task: dict[str, Any],
    aggregates: Sequence[Aggregate],
    labels: list[str],
    what: tuple[str, str],
    read: Callable[[Aggregate], tuple[Estimate, ...]],
    y_label: str,
    reading: str,
) -> StudyFigure | None:
    curves = _curves(aggregates, lambda item: task["lengths"], read)
    if not curves:
        return None
    figure = plot_curves(
        curves,
        labels=labels,
        x_label=f"evaluated length in tokens (trained on {task['train_length']})",
        y_label=y_label,
        reference=_frequencies(task),
        log2_x=True,
        ceiling=_ceiling(task),
    )
    return StudyFigure(
        f"{name}_{what[0]}", name, what[1], f"{reading} {_BANDS}", curve_summary(curves, "length"), figure
    )


def _loss_by_position(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    def middles(item: Aggregate) -> list[float]:
        return [(start + stop) / 2 for start, stop in itertools.pairwise(item.position_edges)]

    curves = _curves([item for item in aggregates if item.position_loss], middles, lambda item: item.position_loss)
    if not curves:
        return None
    figure = plot_curves(
        curves,
        labels=labels,
        x_label="position in the sequence (grey: trained)",
        y_label="loss (nats per token)",
        reference=_frequencies(task),
        shaded_columns=(0, task["train_length"]),
        ceiling=_ceiling(task),
    )
    reading = (
        f"Loss at each position of pieces of {task['lengths'][-1]} tokens. Where a line leaves its level at the edge "
        "of the grey area, the scheme fails at the first position it was not trained on."
    )
    return StudyFigure(
        f"{name}_loss_by_position", name, "Loss by position", f"{reading} {_BANDS}",
        curve_summary(curves, "position"), figure,
    )  # fmt: skip


def _dog_distance(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    measured = [item for item in aggregates if item.dog_layers]
    curves = _curves(measured, lambda item: range(len(item.dog_layers)), lambda item: item.dog_layers)
    if not curves:
        return None
    figure = plot_curves(
        curves,
        labels=labels,
        x_label="layer (0: embeddings; grey: rounding)",
        y_label="distance of the two dogs (relative L2)",
        shaded_rows=(_DOG_FLOOR / 2, ROUNDING),
        whole_x=True,
        floor=_DOG_FLOOR,
    )
    reading = (
        "How far apart the trained model holds the two dogs of 'The dog chased another dog'. In the grey area they are "
        "the same to the model. "
    )
    reading += (
        "In a causal model the mask alone tells them apart, so even no positions give a distance; the probe in the "
        "table shows what the scheme adds."
        if task.get("objective") == "causal"
        else "Without positions they must lie there at every layer."
    )
    return StudyFigure(
        f"{name}_dog_distance", name, "The two dogs, by layer", f"{reading} {_BANDS}",
        curve_summary(curves, "layer"), figure,
    )  # fmt: skip


def _exact_match_map(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    measured = [item for item in aggregates if item.accuracy]
    if not measured:
        return None
    longest = max(task["train_lengths"])
    beyond = [place for place, length in enumerate(task["lengths"]) if length > longest]
    measured.sort(key=lambda item: -sum(item.accuracy[place].mean or 0.0 for place in beyond))
    figure = plot_share_map(
        [[estimate.mean for estimate in item.accuracy] for item in measured],
        [item.scheme for item in measured],
        task["lengths"],
        x_label=f"length (orange line: longest trained, {longest})",
        color_label="exact match",
        trained=longest,
    )
    reading = (
        "Percent of examples answered without an error, mean over seeds. Left of the line are lengths seen in "
        "training; right of it, longer ones. Rows are sorted by their mean beyond the line, best first."
    )
    return StudyFigure(
        f"{name}_exact_match", name, "Exact match by length", reading, share_summary(measured, task), figure
    )


def _exact_match_curves(
    name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]
) -> StudyFigure | None:
    curves = _curves(aggregates, lambda item: task["lengths"], lambda item: item.accuracy)
    if not curves:
        return None
    figure = plot_curves(
        curves,
        labels=labels,
        x_label="length (grey: trained)",
        y_label="exact match (share of examples)",
        shaded_columns=(min(task["train_lengths"]), max(task["train_lengths"])),
        y_limits=(-0.02, 1.02),
    )
    reading = "The same figures as lines. A line that stays up right of the grey area generalises to longer inputs."
    return StudyFigure(
        f"{name}_exact_match_curves", name, "Exact match by length, with intervals", f"{reading} {_BANDS}",
        curve_summary(curves, "length"), figure,
    )  # fmt: skip


def _price(name: str, task: dict[str, Any], aggregates: Sequence[Aggregate], labels: list[str]) -> StudyFigure | None:
    measured = [item for item in aggregates if item.price is not None and item.price.mean is not None]
    if len(measured) < 2:
        return None
    reference = measured[0].price_reference
    figure = plot_intervals(
        [item.scheme for item in measured],
        [_series(f"{measured[0].clock} time", [item.price for item in measured])],
        x_label=f"{measured[0].clock} time per step, as a multiple of {reference}",
        reference=1.0,
    )
    reading = (
        f"{measured[0].clock.capitalize()} time per training step divided by that of `{reference}` with the same seed, "
        "with 95 % intervals. The runs shared the machine: it says what this study took, rather than what a scheme "
        "costs by itself."
    )
    return StudyFigure(f"{name}_price", name, "Price", reading, price_summary(measured), figure)


_LANGUAGE = (
    _loss_curves,
    _further_curves,
    _loss_by_length,
    _tail_loss_by_length,
    _sliding_window,
    _loss_by_position,
    _dog_distance,
    _price,
)
#: Drawn twice where some models start from trained ones, which would crowd one figure.
_APART = (_loss_by_length, _tail_loss_by_length, _loss_by_position)
_GENERALIZATION = (_exact_match_map, _exact_match_curves, _loss_curves, _further_curves, _dog_distance, _price)


def _curves(
    aggregates: Sequence[Aggregate],
    x: Callable[[Aggregate], Sequence[float]],
    read: Callable[[Aggregate], tuple[Estimate, ...]],
) -> list[Curve]:
    curves = []
    for item in aggregates:
        estimates = read(item)
        if any(estimate.mean is not None for estimate in estimates):
            means = tuple(estimate.mean for estimate in estimates)
            widths = tuple(estimate.half_width for estimate in estimates)
            curves.append(Curve(item.scheme, tuple(x(item)), means, widths))
    return curves


def _series(name: str, estimates: Sequence[Estimate | None]) -> IntervalSeries:
    present = [estimate or Estimate(None, None, 0) for estimate in estimates]
    return IntervalSeries(name, tuple(entry.mean for entry in present), tuple(entry.half_width for entry in present))


def _frequencies(task: dict[str, Any]) -> tuple[str, float]:
    return "token frequencies", task["unigram_cross_entropy"]


def _ceiling(task: dict[str, Any]) -> float:
    return float(_CEILING * task["unigram_cross_entropy"])
