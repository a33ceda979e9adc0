"""The figures of a study: what each shows, in what words it is described, and the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.plots.curves import Curve, plot_curves
from hf_posenc.plots.heatmaps import plot_share_map
from hf_posenc.plots.intervals import IntervalSeries, plot_intervals
from hf_posenc.plots.style import save_figure, styled
from hf_posenc.report import Record, Result
from training.study.records import ROUNDING
from training.study.results import Finished, Study, Task

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


@dataclass(frozen=True)
class _Lines:
    """A figure with one line per scheme.

    Args:
        name: of the file, behind that of the task.
        title: a heading.
        quantity: of the records that are drawn.
        key: of `Record.at`, along the horizontal axis.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        reading: how to read it.
        options: of `plot_curves`.
        which: "all" schemes; "new" for those from new weights; "further" for those that go on from another model.
    """

    name: str
    title: str
    quantity: str
    key: str
    x_label: str
    y_label: str
    reading: str
    options: Mapping[str, Any] = field(default_factory=dict)
    which: str = "all"


def draw_figures(study: Study, records: Mapping[str, Result]) -> list[StudyFigure]:
    """Every figure that the finished runs have data for, task by task."""
    labels = list(dict.fromkeys(run.scheme for run in study.runs))
    return [
        figure
        for name, result in records.items()
        for figure in _Drawing(name, study.tasks[name], result, study.finished(name), labels).figures()
    ]


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


@dataclass(frozen=True)
class _Drawing:
    """The figures of one task."""

    name: str
    task: Task
    result: Result
    finished: Sequence[Finished]
    labels: list[str]

    def figures(self) -> Iterator[StudyFigure]:
        if self.task.kind == "generalization":
            yield from self._exact_match_map()
        for lines in self._specifications():
            yield from self._drawn(lines)
        yield from self._sliding_window()
        yield from self._price()

    def _specifications(self) -> list[_Lines]:
        task = self.task
        frequencies, ceiling = None, None
        if task.unigram_cross_entropy is not None:
            frequencies, ceiling = ("token frequencies", task.unigram_cross_entropy), task.unigram_cross_entropy
        trained: dict[str, Any] = {"reference": frequencies, "ceiling": ceiling and _TRAINING_CEILING * ceiling}
        control = self.result.settings["control"]
        if task.pretrained and control is not None:
            trained["reference"] = ("untouched model", self.result.value(control, "swapped"))
        read = {"reference": frequencies, "ceiling": ceiling and _CEILING * ceiling}
        evaluated = (
            f"evaluated length in tokens (trained on {task.train_length or ', '.join(map(str, task.train_lengths))})"
        )
        shown = "cosine to the embeddings before" if task.kind == "embedding" else "loss (nats per token)"
        point = "validation_similarity" if task.kind == "embedding" else "validation_loss"
        curves = [
            _Lines(
                "loss_curves", "While training", point, "step", "training step", f"validation {shown}",
                "On held-out data of the trained length, while training. A line that gets to its level earlier learns "
                "faster; a flat stretch is a plateau that the model has not left yet.",
                trained, "new",
            ),
            _Lines(
                "further_loss_curves", "While training further", point, "step", "training step",
                f"validation {shown}",
                "Models that go on from a trained one, from the first point on. Where the position encoding was "
                "exchanged, the line shows how fast the model recovers.",
                trained, "further",
            ),
        ]  # fmt: skip
        dogs = _Lines(
            "dog_distance", "The two dogs, by layer", "dog_distance", "layer", "layer (0: embeddings; grey: rounding)",
            "distance of the two dogs (relative L2)",
            "How far apart the trained model holds the two dogs of 'The dog chased another dog'. In the grey area they "
            "are the same to the model. A causal mask tells them apart even without positions; without a mask, no "
            "positions mean no distance, at any layer.",
            {"shaded_rows": (_DOG_FLOOR / 2, ROUNDING), "whole_x": True, "floor": _DOG_FLOOR},
        )  # fmt: skip
        if task.kind == "generalization":
            shares = _Lines(
                "exact_match_curves", "Exact match by length, with intervals", "accuracy", "length",
                "length (grey: trained)", "exact match (share of examples)",
                "A line that stays up right of the grey area generalises to longer inputs.",
                {"shaded_columns": (min(task.train_lengths), max(task.train_lengths)), "y_limits": (-0.02, 1.02)},
            )  # fmt: skip
            return [shares, *curves, dogs]
        if task.kind == "embedding":
            return [*curves, *self._by_length("similarity", "Cosine by length", shown, evaluated, {}), dogs]
        tail = task.tail_tokens
        return [
            *curves,
            *self._by_length("loss", "Loss by length", f"mean {shown}", evaluated, read),
            _Lines(
                "tail_loss_by_length", f"Loss of the last {tail} tokens by length", "tail_loss", "length", evaluated,
                f"loss of the last {tail} tokens (nats per token)",
                f"The last {tail} targets are the same at every length, with more and more text before them: what "
                "changes along a line is the effect of the longer context alone.",
                {**read, "log2_x": True}, "apart",
            ),
            _Lines(
                "loss_by_position", "Loss by position", "position_loss", "position",
                "position in the sequence (grey: trained)", shown,
                f"Loss at each position of pieces of {task.lengths[-1]} tokens. Where a line leaves its level at the "
                "edge of the grey area, the scheme fails at the first position it was not trained on.",
                {**read, "shaded_columns": (0, task.train_length)}, "apart",
            ),
            dogs,
        ]  # fmt: skip

    def _by_length(
        self, quantity: str, title: str, y_label: str, x_label: str, options: dict[str, Any]
    ) -> Iterator[_Lines]:
        reading = (
            "The same held-out text, read in pieces of each length. A line that keeps its level uses longer context or "
            "is at least not harmed by it; one that leaves it is a model that fails beyond its training length. "
            "A mean includes the short contexts at the start of every piece, which hide part of a collapse."
        )
        options = {**options, "log2_x": True}
        yield _Lines(f"{quantity}_by_length", title, quantity, "length", x_label, y_label, reading, options, "apart")
        before = "The models right after they got another position encoding, before any training."
        yield _Lines(
            f"swapped_{quantity}_by_length", f"{title}, right after the swap", f"before_{quantity}", "length", x_label,
            y_label, before, options,
        )  # fmt: skip

    # Lines

    def _drawn(self, lines: _Lines) -> Iterator[StudyFigure]:
        further = {run.scheme for run in self.finished if run.start is not None or self.task.pretrained}
        starts = {run.start for run in self.finished}
        every = [subject.label for subject in self.result.subjects]
        # Models that go on from others would crowd one figure, so they are drawn apart, beside those they start from.
        groups = {
            "all": [("", "", every)],
            "new": [("", "", [label for label in every if label not in further])],
            "further": [("", "", [label for label in every if label in further])],
            "apart": [
                ("", "", [label for label in every if label not in further or self.task.pretrained]),
                ("further_", ", models that start from a trained one",
                 [label for label in every if not self.task.pretrained and (label in further or label in starts)]
                 if further else []),
            ],
        }[lines.which]  # fmt: skip
        for prefix, suffix, chosen in groups:
            curves = [curve for label in chosen if (curve := self._curve(label, lines)) is not None]
            if not curves:
                continue
            figure = plot_curves(
                curves, labels=self.labels, x_label=lines.x_label, y_label=lines.y_label, **lines.options
            )
            yield StudyFigure(
                f"{self.name}_{prefix}{lines.name}",
                self.name,
                lines.title + suffix,
                f"{lines.reading} Bands: 95 % interval of the mean over seeds.",
                _described(curves, lines.key),
                figure,
            )

    def _curve(self, label: str, lines: _Lines) -> Curve | None:
        records = list(self.result.of(label, lines.quantity))
        if lines.key == "step" and len(records) == 1 and records[0].at["step"] == 0:  # only read
            return None
        if all(record.value is None for record in records):
            return None
        return Curve(
            label,
            tuple(record.at[lines.key] for record in records),
            tuple(record.value for record in records),
            tuple(_half_width(record) for record in records),
        )

    # Other figures

    def _exact_match_map(self) -> Iterator[StudyFigure]:
        task, longest = self.task, max(self.task.train_lengths)
        rows = {run.scheme: list(self.result.of(run.scheme, "accuracy")) for run in self.finished}
        if not rows:
            return
        beyond = {
            label: sum(record.value or 0.0 for record in records if record.at["length"] > longest)
            for label, records in rows.items()
        }
        ordered = sorted(rows, key=lambda label: -beyond[label])
        figure = plot_share_map(
            [[record.value for record in rows[label]] for label in ordered],
            ordered,
            task.lengths,
            x_label=f"length (orange line: longest trained, {longest})",
            color_label="exact match",
            trained=longest,
        )
        reading = (
            "Percent of examples answered without an error, mean over seeds. Left of the line are lengths seen in "
            "training; right of it, longer ones. Rows are sorted by their mean beyond the line, best first."
        )
        within = [length for length in task.lengths if length <= longest][-1:]
        said = [
            f"{label} "
            + " and ".join(
                f"{100 * (record.value or 0):.0f} percent at {record.at['length']}"
                for record in rows[label]
                if record.at["length"] in (*within, task.lengths[-1])
            )
            for label in ordered
        ]
        text = f"Heat map of exact match by scheme and length: {'; '.join(said)}."
        yield StudyFigure(f"{self.name}_exact_match", self.name, "Exact match by length", reading, text, figure)

    def _sliding_window(self) -> Iterator[StudyFigure]:
        longest = {"length": self.task.lengths[-1]}
        sliding = {record.subject: record for record in self.result.of(quantity="sliding_loss") if record.count}
        if not sliding:
            return
        whole = [self.result.record(label, "loss", **longest) for label in sliding]
        figure = plot_intervals(
            list(sliding),
            [_series("whole context", whole), _series("sliding window", list(sliding.values()))],
            x_label=f"loss at {self.task.lengths[-1]} tokens (nats per token; dashed: token frequencies)",
            reference=self.task.unigram_cross_entropy,
        )
        reading = (
            f"The same text of {self.task.lengths[-1]} tokens, once as a whole, and once in overlapping windows of "
            f"{self.task.train_length} tokens, so that the model never meets a longer input than in training. Where "
            "the whole context is worse, the scheme is better off with the window."
        )
        said = [
            f"{record.subject} {_said(record, 3)} with the whole context and {_said(sliding[record.subject], 3)} with "
            "the window"
            for record in whole
        ]
        text = f"Loss at {self.task.lengths[-1]} tokens: {'; '.join(said)}."
        title = "Whole context or sliding window"
        yield StudyFigure(f"{self.name}_sliding_window", self.name, title, reading, text, figure)

    def _price(self) -> Iterator[StudyFigure]:
        prices = [record for record in self.result.of(quantity="price") if record.value is not None]
        if len(prices) < 2:
            return
        reference = self.result.settings["price_reference"]
        time = f"{self.result.settings['clock']} time"
        figure = plot_intervals(
            [record.subject for record in prices],
            [_series(time, prices)],
            x_label=f"{time} per step, as a multiple of {reference}",
            reference=1.0,
        )
        reading = (
            f"{time.capitalize()} per training step divided by that of `{reference}` with the same seed, with 95 % "
            "intervals. The runs shared the machine: it says what this study took, rather than what a scheme costs by "
            "itself."
        )
        said = "; ".join(f"{record.subject} {_said(record, 2)}" for record in prices)
        text = f"{time.capitalize()} per step relative to {reference}: {said}."
        yield StudyFigure(f"{self.name}_price", self.name, "Price", reading, text, figure)


def _described(curves: Sequence[Curve], x_name: str) -> str:
    """Every line by its first and last value, the lowest end first."""
    ends = {}
    for curve in curves:
        points = [(x, mean) for x, mean in zip(curve.x, curve.mean, strict=True) if mean is not None]
        ends[curve.label] = points[0], points[-1]
    parts = [
        f"{label} from {first[1]:.3g} at {x_name} {first[0]:g} to {last[1]:.3g} at {last[0]:g}"
        for label, (first, last) in sorted(ends.items(), key=lambda item: item[1][1][1])
    ]
    return f"Line chart of {len(curves)} scheme{'s' if len(curves) != 1 else ''}: {'; '.join(parts)}."


def _half_width(record: Record) -> float | None:
    return None if record.high is None or record.low is None else (record.high - record.low) / 2


def _said(record: Record, digits: int) -> str:
    half = _half_width(record)
    return f"{record.value:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def _series(name: str, records: Sequence[Record]) -> IntervalSeries:
    return IntervalSeries(
        name, tuple(record.value for record in records), tuple(_half_width(record) for record in records)
    )
