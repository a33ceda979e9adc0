"""Aggregates as tables, for Markdown and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.metrics.dog import PROBE_TOLERANCE
from hf_posenc.report.tables import format_table
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.registry import scheme_from_dict
from training.study.aggregation import ROUNDING, Aggregate, Estimate, aggregate, of_task
from training.study.schema import GENERALIZATION

MISSING = "-"

_DOG_NOTES = {
    "causal": "Dogs: distance between the two dogs of 'The dog chased another dog' (relative L2). The causal mask "
    "alone tells them apart, with or without positions; the probe, random attention without a mask over the model's "
    "embeddings, shows what the scheme adds.",
    "masked": "Dogs: distance between the two dogs of 'The dog chased another dog' (relative L2), in the model and in "
    "random attention over its embeddings (probe). Without positions there is none.",
}
_INTERVAL_NOTE = (
    "Figures are means over the finished seeds, ± half of the 95 % interval of that mean (Student's t over seeds); "
    "a figure without ± has one seed."
)


@dataclass(frozen=True)
class Table:
    """A table in words.

    Args:
        title: what it shows.
        headers: one name per column; the first column names the scheme.
        rows: cells as text.
        notes: footnotes; code stands between backticks.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def format_tables(results: dict[str, Any]) -> str:
    """Markdown: a heading per task, how it was trained, its tables, and what could not be trained, with the reason.

    Raises:
        ResultsError: for results that `check_results` refuses.
    """
    aggregates = aggregate(results)
    parts = [f"# {results['name']}", f"Made by `{results['command']}`. {_INTERVAL_NOTE}"]
    for name, task in results["tasks"].items():
        found = of_task(aggregates, name)
        if not found:
            continue
        parts += [f"## {task_title(name, task)}", task_text(task)]
        for table in task_tables(name, task, found):
            parts += [f"### {table.title}", format_table(table.headers, table.rows, markdown=True)]
            parts += ["\n".join(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n\n".join(parts) + "\n"


def task_title(name: str, task: dict[str, Any]) -> str:
    """Such as "causal: causal language modelling with LlamaForCausalLM"."""
    kind = "length generalisation" if task["kind"] == GENERALIZATION else f"{task['objective']} language modelling"
    return f"{name}: {kind} with {task['model']}"


def task_text(task: dict[str, Any]) -> str:
    """How the models of a task were trained, and what its figures are."""
    budget = f"{task['max_steps']:,} steps of {task['batch_size']} sequences"
    if task["kind"] == GENERALIZATION:
        trained = ranges(task["train_lengths"])
        return (
            f"Trained on lengths {trained}, {budget}; tested on up to {task['samples']} examples of every length, "
            "none of them trained on where the task has that many. An answer counts if every token of it is right "
            "(exact match)."
        )
    return (
        f"Trained on {task['train_length']} tokens, {budget}; evaluated on the same held-out text at every length. "
        f"Losses in nats per token. A model that knows token frequencies only: {task['unigram_cross_entropy']:.3f}."
    )


def task_tables(name: str, task: dict[str, Any], aggregates: Sequence[Aggregate]) -> list[Table]:
    """The figures of a task, and, where the unpatched control was trained, the differences from it."""
    main = _generalization if task["kind"] == GENERALIZATION else _language_modeling
    tables = [main(task, aggregates)]
    compared = [item for item in aggregates if item.difference]
    if compared:
        tables.append(_differences(task, compared))
    return tables


def scheme_text(aggregate: Aggregate) -> str:
    """What a label stands for: the scheme with the options that differ from its defaults."""
    return "the unpatched model" if aggregate.config is None else scheme_label(scheme_from_dict(aggregate.config))


def number(estimate: Estimate | None, digits: int = 3, factor: float = 1.0) -> str:
    """`1.652 ± 0.012`, `1.652` for one seed, `-` for none."""
    if estimate is None or estimate.mean is None:
        return MISSING
    # Adding zero turns the negative zero that rounding leaves into a plain one.
    text = f"{round(factor * estimate.mean, digits) + 0.0:.{digits}f}"
    return text if estimate.half_width is None else f"{text} ± {factor * estimate.half_width:.{digits}f}"


def ranges(lengths: Sequence[int]) -> str:
    """`1 to 10` for consecutive whole numbers, else the numbers."""
    if len(lengths) > 2 and list(lengths) == list(range(lengths[0], lengths[-1] + 1)):
        return f"{lengths[0]} to {lengths[-1]}"
    return ", ".join(map(str, lengths))


def _language_modeling(task: dict[str, Any], aggregates: Sequence[Aggregate]) -> Table:
    lengths, tail = task["lengths"], task["tail_tokens"]
    ends = (0, len(lengths) - 1) if len(lengths) > 1 else (0,)
    sliding = any(item.sliding_loss is not None for item in aggregates)
    headers = ["scheme", "seeds", *(f"loss at {length}" for length in lengths)]
    headers += [f"last {tail} at {lengths[place]}" for place in ends]
    headers += [f"sliding at {lengths[-1]}"] if sliding else []
    headers += ["dogs, last layer", "dogs, probe", "parameters", _time_header(aggregates)]
    rows = []
    for item in aggregates:
        cells = [number(_at(item.loss, place)) for place in range(len(lengths))]
        cells += [number(_at(item.tail_loss, place)) for place in ends]
        cells += [number(item.sliding_loss)] if sliding else []
        cells += [_distance(_at(item.dog_layers, -1), ROUNDING), _distance(item.dog_probe, PROBE_TOLERANCE)]
        rows.append((item.scheme, _seeds(item), *cells, _count(item.parameters), number(item.seconds, 1, 1000.0)))
    notes = _notes(task, aggregates)
    if sliding:
        notes.append(
            f"Sliding: the text is read in overlapping windows of {task['train_length']} tokens, so that no token sees "
            "further back than that and a model never meets a longer input than in training."
        )
    if any(item.dog_layers for item in aggregates):
        notes.append(_DOG_NOTES[task["objective"]])
    return Table("Loss by length", tuple(headers), tuple(rows), tuple(notes))


def _generalization(task: dict[str, Any], aggregates: Sequence[Aggregate]) -> Table:
    lengths = task["lengths"]
    headers = (
        "scheme",
        "seeds",
        *map(str, lengths),
        f"tokens right at {lengths[-1]}",
        "parameters",
        _time_header(aggregates),
    )
    rows = [
        (
            item.scheme,
            _seeds(item),
            *(number(_at(item.accuracy, place), 0, 100.0) for place in range(len(lengths))),
            number(_at(item.token_accuracy, -1), 0, 100.0),
            _count(item.parameters),
            number(item.seconds, 1, 1000.0),
        )
        for item in aggregates
    ]
    notes = [f"Percent of examples answered without an error, by length; trained on {ranges(task['train_lengths'])}."]
    notes += ["An interval of a share near 0 or 100 can reach past it."] if any(i.n > 1 for i in aggregates) else []
    return Table("Exact match by length", headers, tuple(rows), (*notes, *_notes(task, aggregates)))


def _time_header(aggregates: Sequence[Aggregate]) -> str:
    return "ms per step" if aggregates[0].clock == "wall" else "processor ms per step"


def _differences(task: dict[str, Any], aggregates: Sequence[Aggregate]) -> Table:
    language = task["kind"] != GENERALIZATION
    digits, factor = (3, 1.0) if language else (0, 100.0)
    headers = ("scheme", "pairs", *(f"at {length}" if language else str(length) for length in task["lengths"]))
    rows = [
        (
            item.scheme,
            str(max(difference.n for difference in item.difference)),
            *(number(difference, digits, factor) for difference in item.difference),
        )
        for item in aggregates
    ]
    what = "Loss less that" if language else "Percentage points of exact match more than"
    better = "below zero is better" if language else "above zero is better"
    note = (
        f"{what} of the unpatched control (`{aggregates[0].control}`) with the same seed: {better}. Where the interval "
        "leaves out zero, the difference is more than the seeds' spread."
    )
    return Table("Difference from the unpatched control", headers, tuple(rows), (note,))


def _notes(task: dict[str, Any], aggregates: Sequence[Aggregate]) -> list[str]:
    notes = []
    for item in aggregates:
        text = scheme_text(item)
        if text != item.scheme:
            notes.append(f"`{item.scheme}` is {text if item.config is None else f'`{text}`'}.")
        notes += budget_lines(task, item)
    for item in aggregates:
        notes += [f"`{item.scheme}`, {line}" for line in unfinished_lines(item)]
        notes += [f"`{item.scheme}`: {note}" for note in item.notes]
        notes += [f"`{item.scheme}`, dog test: {error}" for error in item.dog_errors]
        measured = [*item.loss, *item.tail_loss, *item.accuracy]
        if any(estimate.n < item.n for estimate in measured):
            notes.append(
                f"`{item.scheme}`: some figures are of fewer seeds, because a run had no number there (the loss "
                "overflowed, or the length was refused)."
            )
    return notes


def budget_lines(task: dict[str, Any], aggregate: Aggregate) -> list[str]:
    """How the training of a scheme differs from that of its task; nothing where it does not."""
    lines = []
    steps = aggregate.steps[-1] if aggregate.steps else None
    if aggregate.start is not None:
        more = ""
        if steps is not None:
            more = f", trained for {steps:,} steps more" if steps else ", read as it is, without further training"
        lines.append(f"`{aggregate.scheme}` starts from the trained `{aggregate.start}` of the same seed{more}.")
    elif steps is not None and steps != task["max_steps"]:
        lines.append(f"`{aggregate.scheme}` was trained for {steps:,} steps.")
    other = {name: value for name, value in aggregate.training.items() if name != "max_steps"}
    if other:
        listed = ", ".join(f"{name}={value}" for name, value in other.items())
        lines.append(f"`{aggregate.scheme}` was trained with `{listed}`.")
    return lines


def unfinished_lines(aggregate: Aggregate) -> list[str]:
    """`seed 0 unsupported: reason`; seeds with the same reason share a line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for run in aggregate.unfinished:
        groups.setdefault((run.status, run.reason), []).append(run.seed)
    return [
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))} {status}: {reason}"
        for (status, reason), seeds in groups.items()
    ]


def _seeds(item: Aggregate) -> str:
    total = item.n + len(item.unfinished)
    return str(item.n) if item.n == total else f"{item.n} of {total}"


def _at(estimates: Sequence[Estimate], place: int) -> Estimate | None:
    return estimates[place] if estimates else None


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _distance(estimate: Estimate | None, rounding: float) -> str:
    if estimate is None or estimate.mean is None:
        return MISSING
    if estimate.mean <= rounding:
        return "0"
    text = f"{estimate.mean:.2g}"
    return text if estimate.half_width is None else f"{text} ± {estimate.half_width:.1g}"
