"""One trained model on one task, under its own scheme or under several put in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hf_posenc.metrics.generalization.exact_match import Method, exact_match, tested_lengths
from hf_posenc.metrics.generalization.result import GeneralizationResult
from hf_posenc.metrics.generalization.task import SyntheticTask
from hf_posenc.metrics.generalization.tasks import get_task
from hf_posenc.metrics.in_turn import Measured, config_in_force, measure_in_turn
from hf_posenc.patching.apply import unwrapped
from hf_posenc.report.records import Quantity, Record, Result, Subject, View
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.tables import format_number

_QUANTITIES = (
    Quantity("exact_match", "length {length}", style="fraction"),
    Quantity("token_accuracy", "tokens, length {length}", style="fraction"),
    Quantity("held_out", "held out, length {length}", style="verdict"),
)
#: Of a single model there is room for every number: a row for each length.
_QUANTITIES_BY_ROW = (
    Quantity("exact_match", "exact match", style="fraction"),
    Quantity("token_accuracy", "token accuracy", style="fraction"),
    Quantity("examples", "examples", style="count"),
    Quantity("held_out", "held out", style="verdict"),
)


def compare_generalization(
    model: Any,
    tokenizer: Any,
    task: str | SyntheticTask,
    lengths: Sequence[int] | None = None,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    samples: int = 100,
    seed: int = 0,
    method: Method = "teacher_forced",
    batch_size: int = 64,
) -> Result:
    """`exact_match` under schemes that are put in place after training, such as a scaled RoPE or none at all.

    Args:
        model: a causal language model, patched or not; left as it was found.
        tokenizer: the one that it was trained with.
        task: see `exact_match`, as are the options that follow `schemes`.
        lengths: the lengths to test.
        schemes: names or configs, put into the stock model one after the other; `"native"` is the stock model itself.
            `None` measures the model as it is.
        samples: examples per length.
        seed: of the examples, and of new weights of a scheme.
        method: `"teacher_forced"` or `"generate"`.
        batch_size: examples per forward.

    Returns:
        For each scheme and `length` the `exact_match` with its 95 % Wilson interval, the `token_accuracy` where it was
        measured, the number of `examples`, and whether they are `held_out`.

    Raises:
        UnknownNameError: for an unknown task or scheme, before the model is touched.
        MeasurementError: for a length, a method or a tokenizer that does not do.
        UnsupportedError: for a model that is not causal, unless `schemes` are given: their rows then say so.
    """
    task = get_task(task)
    lengths = tested_lengths(task, lengths)

    def exact(model: Any) -> GeneralizationResult:
        return exact_match(
            model, tokenizer, task, lengths, samples=samples, seed=seed, method=method, batch_size=batch_size
        )

    name = type(unwrapped(model)).__name__
    if schemes is None:
        # Not in turn: what the model cannot do is then an error, not a row.
        found = exact(model)
        config = config_in_force(model)
        options = None if config is None else config.to_dict()
        subjects: tuple[Subject, ...] = (
            Subject(found.scheme, "native" if config is None else config.name, options, found.notes),
        )
        records = tuple(dataclasses.replace(record, subject=found.scheme) for record in _records(found))
    else:

        def measure(model: Any) -> Measured:
            found = exact(model)
            return Measured(list(_records(found)), found.notes)

        subjects, records = measure_in_turn(model, schemes, measure, seed=seed)
    single = len(subjects) == 1
    by_row = View(tuple(quantity.name for quantity in _QUANTITIES_BY_ROW), rows=("length",))
    return Result(
        task="generalization",
        title=f"{name}, task {task.name!r} ({method}, seed {seed}): exact match by length",
        quantities=_QUANTITIES_BY_ROW if single else _QUANTITIES,
        subjects=subjects,
        records=records if single else tuple(record for record in records if record.quantity != "examples"),
        views=(by_row if single else View(("exact_match",)),),
        settings={
            "model": name,
            "task": task.name,
            "lengths": list(lengths),
            "method": method,
            "samples": samples,
            "chance": task.chance,
            "seed": seed,
        },
        remarks=(
            f"length: {task.length_meaning}. A blind guess is right with probability {format_number(task.chance)}.",
        ),
    )


def _records(found: GeneralizationResult) -> Iterator[Record]:
    for row in found.rows:
        at = {"length": row.length}
        low, high = row.interval or (None, None)
        note = f"length {row.length}: {row.reason}" if row.reason else ""
        yield Record("", "exact_match", row.exact_match, at, low, high, row.samples, note=note)
        if row.token_accuracy is not None:
            yield Record("", "token_accuracy", row.token_accuracy, at)
        yield Record("", "examples", row.samples, at)
        yield Record("", "held_out", None, at, passed=row.held_out)
