"""One trained model on one task, under its own scheme or under several put in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.metrics.generalization.exact_match import Method, exact_match, tested_lengths
from hf_posenc.metrics.generalization.result import GeneralizationResult
from hf_posenc.metrics.generalization.task import SyntheticTask
from hf_posenc.metrics.generalization.tasks import get_task
from hf_posenc.metrics.in_turn import UnderScheme, footnoted, measure_in_turn
from hf_posenc.metrics.naming import first_row
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.tables import format_number, format_table


@dataclass(frozen=True)
class GeneralizationComparison:
    """Exact match by length under several position encodings.

    Args:
        task: name of the task.
        lengths: what was tested.
        rows: one per position encoding.
    """

    task: str
    lengths: tuple[int, ...]
    rows: tuple[UnderScheme[GeneralizationResult], ...]

    def row(self, scheme: str) -> UnderScheme[GeneralizationResult]:
        """The row of one scheme.

        Raises:
            KeyError: if there is none.
        """
        return first_row(self.rows, scheme, "test of length generalisation")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every field."""
        return asdict(self)

    def table(self, *, markdown: bool = False) -> str:
        """All numbers of a single model; of several, exact match by length, one line per scheme.

        Args:
            markdown: as a Markdown table.
        """
        if len(self.rows) == 1 and self.rows[0].value is not None:
            return self.rows[0].value.table(markdown=markdown)
        cells: list[list[str]] = []
        notes: list[str] = []
        reasons: dict[str, None] = {}
        for row, (label, new) in zip(self.rows, footnoted(self.rows), strict=True):
            found = {} if row.value is None else {measured.length: measured for measured in row.value.rows}
            cells.append([label, *(format_number(found[n].exact_match if n in found else None) for n in self.lengths)])
            notes += [*new, *(() if row.value is None else row.value.notes)]
            reasons |= {f"{row.label}, length {n}: {found[n].reason}": None for n in found if found[n].reason}
        gap = "\n\n" if markdown else "\n"
        lines = [
            f"Task {self.task!r}, exact match by length",
            "",
            format_table(["scheme", *map(str, self.lengths)], cells, markdown=markdown),
        ]
        return "\n".join(lines) + "".join(gap + note for note in (*dict.fromkeys(notes), *reasons))


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
) -> GeneralizationComparison:
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

    Raises:
        UnknownNameError: for an unknown task or scheme, before the model is touched.
        MeasurementError: for a length, a method or a tokenizer that does not do.
        UnsupportedError: for a model that is not causal, unless `schemes` are given: their rows then say so.
    """
    task = get_task(task)
    lengths = tested_lengths(task, lengths)

    def measure(model: Any) -> GeneralizationResult:
        return exact_match(
            model, tokenizer, task, lengths, samples=samples, seed=seed, method=method, batch_size=batch_size
        )

    if schemes is None:
        # Not in turn: what the model cannot do is then an error, not a row.
        label = (result := measure(model)).scheme
        return GeneralizationComparison(task.name, lengths, (UnderScheme(label, label, None, result),))
    return GeneralizationComparison(task.name, lengths, tuple(measure_in_turn(model, schemes, measure, seed=seed)))
