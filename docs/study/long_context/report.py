"""The tables of the study of longer texts, from `runs.parquet`.

    python docs/study/long_context/report.py

They are printed only if every measurement of the losses is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
from numpy.typing import NDArray

from docs.study.long_context.material import BEFORE, METHODS, TARGETS, text_files
from docs.study.significance import Interval, holm, mean_difference, p_equivalent, p_less
from training.errors import SettingsError

RUNS = Path(__file__).resolve().parent / "runs.parquet"
#: Of claim A, in nats.
MARGIN = 0.02
LEVEL = 0.05
_SHORT, _CUT, _LONG = BEFORE[0], BEFORE[1], BEFORE[-1]

#: Losses of all texts in one order, by method and number of tokens before the targets.
Losses = Mapping[tuple[str, int], NDArray[np.float64]]


@dataclass(frozen=True)
class Verdict:
    """The result of a claim about a method.

    Args:
        difference: the mean difference in nats, with its interval.
        p_value: after Holm's correction; `None` if there was nothing to test.
        passed: whether the claim is confirmed.
    """

    difference: Interval
    p_value: float | None
    passed: bool


def losses_of(rows: Iterable[Mapping[str, Any]]) -> Losses:
    """The losses by method and length.

    Raises:
        SettingsError: if one is missing.
    """
    known = {(row["method"], row["before"], row["text"]): row["loss"] for row in rows if row["part"] == "losses"}
    missing, losses = [], {}
    for method, how in METHODS.items():
        for before in BEFORE:
            measured = method if how.same_up_to < before + TARGETS else "native"
            names = [(measured, before, text) for text in text_files()]
            missing += [name for name in names if name not in known]
            losses[method, before] = np.array([known.get(name, np.nan) for name in names])
    if missing:
        raise SettingsError(
            f"{len(set(missing))} losses are missing, such as {missing[0]}. The protocol makes no table of a part of "
            "the results: run docs/study/long_context/run.py until it has nothing left, then its part `pack`."
        )
    return losses


def verdicts(losses: Losses) -> dict[tuple[str, str], Verdict]:
    """The verdict on each claim (A, B, C) about each method but the native one."""
    compared = {
        "A": (_SHORT, losses["native", _SHORT]),
        "B": (_LONG, losses["native", _LONG]),
        "C": (_LONG, losses["native", _CUT]),
    }
    differences = {
        (claim, method): losses[method, length] - baseline
        for method in METHODS
        if method != "native"
        for claim, (length, baseline) in compared.items()
    }
    by_definition = {("A", name) for name, how in METHODS.items() if how.same_up_to >= _SHORT + TARGETS}
    tested = [name for name in differences if name not in by_definition]
    values = [
        p_equivalent(differences[name], MARGIN) if name[0] == "A" else p_less(differences[name]) for name in tested
    ]
    corrected = dict(zip(tested, holm(values), strict=True))
    return {
        name: Verdict(
            mean_difference(difference),
            corrected.get(name),
            name in by_definition or corrected[name] < LEVEL,
        )
        for name, difference in differences.items()
    }


def loss_table(losses: Losses) -> str:
    """Mean losses by method and length."""
    lines = ["| method | " + " | ".join(f"{before:,}" for before in BEFORE) + " |", "|---|" + "---:|" * len(BEFORE)]
    for method in METHODS:
        cells = [f"{losses[method, before].mean():.3f}" for before in BEFORE]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict_table(found: Mapping[tuple[str, str], Verdict]) -> str:
    """The difference and the verdict of each claim about each method."""
    lines = ["| method | A: short texts | B: than nothing | C: than cutting |", "|---|---:|---:|---:|"]
    for method in METHODS:
        if method == "native":
            continue
        cells = []
        for claim in "ABC":
            verdict = found[claim, method]
            word = "the same" if verdict.p_value is None else "yes" if verdict.passed else "undecided"
            cells.append(word if verdict.p_value is None else f"{verdict.difference} {word}")
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def found_table(rows: Iterable[Mapping[str, Any]], part: str) -> str:
    """How many facts each method found, by length of the text."""
    counts: dict[str, dict[int, list[bool]]] = {}
    for row in rows:
        if row["part"] == part:
            counts.setdefault(row["method"], {}).setdefault(row["before"], []).extend(row["right"])
    lengths = sorted({length for of_method in counts.values() for length in of_method})
    lines = ["| method | " + " | ".join(f"{length:,}" for length in lengths) + " |", "|---|" + "---:|" * len(lengths)]
    for method in METHODS:
        if method in counts:
            of_lengths = [counts[method].get(length) for length in lengths]
            cells = ["-" if right is None else f"{sum(right)} of {len(right)}" for right in of_lengths]
            lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def price_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Time and peak memory of each method, and its time as a multiple of the native model's."""
    prices = {row["method"]: row for row in rows if row["part"] == "price"}
    lines = ["| method | seconds | times native | peak MiB |", "|---|---:|---:|---:|"]
    for method in METHODS:
        if method in prices:
            seconds = prices[method]["on_clock"]
            times = seconds / prices["native"]["on_clock"]
            lines.append(f"| `{method}` | {seconds:.0f} | {times:.2f} | {prices[method]['peak_mib']:,.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Prints the tables. Returns the exit status."""
    from pyarrow import parquet

    rows = parquet.read_table(RUNS).to_pylist() if RUNS.exists() else []
    try:
        losses = losses_of(rows)
    except SettingsError as error:
        print(f"long_context: {error}", file=sys.stderr)
        return 2
    parts = (found_table(rows, "needles"), found_table(rows, "passkey"), price_table(rows))
    print(*(loss_table(losses), verdict_table(verdicts(losses)), *parts), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
