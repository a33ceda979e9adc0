"""Writes the tables and figures of the study of longer texts into its pages, from `runs.parquet`.

    python docs/study/long_context/report.py

It needs every measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from docs.study.long_context.figures import draw_all
from docs.study.long_context.material import BEFORE, METHODS, NEEDLE_LENGTHS, PASSKEY_LENGTH
from docs.study.long_context.verdicts import Losses, Verdict, check_other_parts, losses_of, recommended, verdicts
from docs.study.table_numbers import filled, markdown
from training.errors import SettingsError

FOLDER = Path(__file__).resolve().parent
PAGES = (FOLDER / "results.md", FOLDER.parents[1] / "how_to" / "context_length.md")


def loss_table(losses: Losses) -> str:
    """Mean losses by method and length."""
    rows = [(f"`{method}`", *(f"{losses[method, before].mean():.3f}" for before in BEFORE)) for method in METHODS]
    return markdown(("method", *(f"{before:,}" for before in BEFORE)), rows)


def verdict_table(found: Mapping[tuple[str, str], Verdict]) -> str:
    """The difference and the verdict of each claim about each method."""
    rows = []
    for method in METHODS:
        if method == "native":
            continue
        cells = [f"`{method}`"]
        for claim in "ABC":
            verdict = found[claim, method]
            if verdict.p_value is None:
                cells.append("the same")
                continue
            worse = ", worse" if claim != "A" and verdict.difference.low > 0 else ""
            cells.append(f"{verdict.difference} {'yes' if verdict.passed else f'undecided{worse}'}")
        rows.append(cells)
    return markdown(("method", "A: same on short texts", "B: beats no change", "C: beats cutting"), rows)


def found_table(rows: Iterable[Mapping[str, Any]], part: str) -> str:
    """How many facts each method found, by length of the text."""
    counts: dict[str, dict[int, list[bool]]] = {}
    for row in rows:
        if row["part"] == part:
            counts.setdefault(row["method"], {}).setdefault(row["before"], []).extend(row["right"])
    lengths = sorted({length for of_method in counts.values() for length in of_method})
    cells = []
    for method in METHODS:
        if method in counts:
            of_lengths = [counts[method].get(length) for length in lengths]
            found = ("-" if right is None else f"{sum(right)} of {len(right)}" for right in of_lengths)
            cells.append((f"`{method}`", *found))
    return markdown(("method", *(f"{length:,}" for length in lengths)), cells)


def price_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Time and peak memory of each method, and its time as a multiple of the native model's."""
    prices = {row["method"]: row for row in rows if row["part"] == "price"}
    cells = []
    for method in METHODS:
        if method in prices:
            seconds = prices[method]["on_clock"]
            times = seconds / prices["native"]["on_clock"]
            cells.append((f"`{method}`", f"{seconds:.0f}", f"{times:.2f}", f"{prices[method]['peak_mib']:,.0f}"))
    return markdown(("method", "seconds", "times native", "peak MiB"), cells)


def summary_table(losses: Losses, rows: list[Mapping[str, Any]]) -> str:
    """What each method costs and brings, in one table."""
    longest, price = max(NEEDLE_LENGTHS), {row["method"]: row["on_clock"] for row in rows if row["part"] == "price"}
    methods = []
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        facts = [right for row in own if (row["before"], row["text"]) == (longest, "0") for right in row["right"]]
        passkeys = [right for row in own if row["part"] == "passkey" for right in row["right"]]
        cells = [f"{losses[method, before].mean():.3f}" for before in (BEFORE[0], BEFORE[-1])]
        cells += [f"{sum(found)} of {len(found)}" for found in (facts, passkeys)]
        methods.append((f"`{method}`", *cells, f"{price[method] / price['native']:.2f}"))
    after = f"loss after {BEFORE[0]:,} tokens", f"after {BEFORE[-1]:,}"
    found = f"facts in {longest:,} tokens", f"passkeys in {PASSKEY_LENGTH:,}"
    return markdown(("method", *after, *found, "time"), methods)


def recommendation(losses: Losses, rows: Iterable[Mapping[str, Any]]) -> str:
    """The methods that the protocol's rule chooses, with all claims and without the one about cutting."""
    rows, chosen = list(rows), []
    for claims in ("ABC", "AB"):
        methods = ", ".join(f"`{method}`" for method in recommended(losses, rows, claims))
        chosen.append((", ".join(claims), methods or "none"))
    return markdown(("claims that have to hold", "methods, in the order of the rule"), chosen, texts=2)


def tables_of(losses: Losses, rows: list[Mapping[str, Any]]) -> dict[str, Callable[[], str]]:
    """What makes each table, by its name."""
    return {
        "losses": lambda: loss_table(losses),
        "verdicts": lambda: verdict_table(verdicts(losses)),
        "needles": lambda: found_table(rows, "needles"),
        "passkey": lambda: found_table(rows, "passkey"),
        "price": lambda: price_table(rows),
        "summary": lambda: summary_table(losses, rows),
        "recommendation": lambda: recommendation(losses, rows),
    }


def main() -> int:
    """Writes them. Returns the exit status."""
    from pyarrow import parquet

    runs, figures = FOLDER / "runs.parquet", FOLDER / "figures"
    rows = parquet.read_table(runs).to_pylist() if runs.exists() else []
    try:
        losses = losses_of(rows)
        check_other_parts(losses, rows)
    except SettingsError as error:
        print(f"long_context: {error}", file=sys.stderr)
        return 2
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), tables_of(losses, rows)), encoding="utf-8")
    figures.mkdir(exist_ok=True)
    for name, png in draw_all(losses, rows).items():
        (figures / name).write_bytes(png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
