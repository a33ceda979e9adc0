"""What was measured of a scheme, from the committed results: where it runs, what it costs, its loss in the study."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from docs.generate.runtimes import DATA, answers
from hf_posenc.report.tables import markdown_table

DOCS = Path(__file__).resolve().parents[1]
#: Benchmarks whose rows are schemes: the folder below docs/results, the cell, and what was timed.
PRICES = (
    ("price", "model train 1024", "training step, 1,024 tokens"),
    ("price_decaying", "model train 4096", "training step, 4,096 tokens"),
    ("price", "model train 4096", "training step, 4,096 tokens"),
    ("price_16k", "model train 16384", "training step, 16,384 tokens"),
    ("price", "model forward 1024", "forward pass, 1,024 tokens"),
    ("price", "model decode 1024", "generated token, 1,024 cached tokens"),
    ("price_vision", "vit train 196", "training step of a small ViT"),
    ("price_narrow_compiled", "narrow train_compiled 32", "training step of a narrow model, compiled"),
    ("price_narrow_compiled", "narrow decode_compiled 32", "generated token of a narrow model, compiled"),
)
#: Its gates were not trained there, and forget at once. A model that is used skips fewer keys.
LEFT_OUT = ("price_decaying", "forget_gate")


def results(name: str) -> str:
    """The tables of a scheme in Markdown; a table without a measurement is left out."""
    return (
        "\n\n".join(filter(None, (_runtimes(name), _cost(name), _losses(name))))
        or "Neither runtimes nor costs nor losses were measured for this scheme."
    )


def _runtimes(name: str) -> str:
    found = answers(json.loads(DATA.read_text())).get(name)
    return _table("Where it runs", "runtimes", "../runtimes.md", tuple(found), [tuple(found.values())]) if found else ""


def _cost(name: str) -> str:
    rows: dict[str, tuple[str, str, str]] = {}
    for folder, cell, timed in PRICES:
        for row in _benchmark(folder)[cell]["rows"] if (folder, name) != LEFT_OUT else ():
            if row["subject"] == name and timed not in rows:
                ratio = row["ratio"]
                spread = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
                rows[timed] = (f"[{timed}](../../results/{folder}/table.md)", f"{ratio['median']:.3f}", spread)
    if not rows:
        return ""
    head = ("what was timed", "ratio", "quartiles")
    link = "../../repository/benchmarks/README.md"
    return _table(
        "Time relative to the same model without positions, on a CPU", "how it is measured", link, head, rows.values()
    )


@cache
def _benchmark(folder: str) -> dict[str, dict[str, list[dict[str, object]]]]:
    return json.loads((DOCS / "results" / folder / "results.json").read_text())["cells"]


def _losses(name: str) -> str:
    """The row of the leaderboard, which is computed from the raw runs."""
    head: list[str] = []
    for line in (DOCS / "study" / "leaderboard.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "scheme":
            head = cells[1:]
        elif cells[0] == f"`{name}`" and "trained length" in head:
            values = dict(zip(head, cells[1:], strict=True)) | ({} if "seeds" in head else {"seeds": "1"})
            shown = {title: values[title] for title in ("trained length", "minus RoPE", "4 times", "8 times", "seeds")}
            title = "Loss of a small model at its trained length and beyond"
            return _table(title, "leaderboard", "../../study/leaderboard.md", tuple(shown), [tuple(shown.values())])
    return ""


def _table(title: str, source: str, link: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return f"{title} ([{source}]({link})):\n\n{markdown_table(head, list(rows))}"
