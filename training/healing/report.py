"""Tables and figures of a healing study."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from hf_posenc.plots.curves import Curve, plot_curves
from hf_posenc.plots.style import save_figure, styled
from training.files import write_json, write_text
from training.study.aggregation import Estimate, estimate

#: Characters of an axis label in one line, which is as high as the axis.
_LABEL_WIDTH = 40


def write_outputs(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes `results.json`, `table.md` and the figures of what has finished.

    Args:
        results: of a study, complete or not: `study`, and `cells` as `training/heal.py` collects them.
        folder: of the study.

    Returns:
        The files.
    """
    write_json(folder / "results.json", results)
    write_text(folder / "table.md", format_table(results) + "\n")
    return [folder / "results.json", folder / "table.md", *draw_figures(results, folder / "plots")]


def by_name(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The finished cells, seeds together, in the order of the study."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in results["cells"]:
        if cell["status"] == "finished":
            found.setdefault(cell["name"], []).append(cell)
    return found


def format_table(results: dict[str, Any]) -> str:
    """Markdown: what is lost by the swap, what is won back, and both by length."""
    groups = by_name(results)
    if not groups:
        return "No cell has finished yet."
    first = next(iter(groups.values()))[0]
    lengths, loss = first["lengths"], results["study"]["objective"] != "embedding"
    step = max(cell["curve"]["step"][-1] for cells in groups.values() for cell in cells)
    shown = "perplexity" if loss else "cosine"
    headers = [
        "cell",
        "seeds",
        "first",
        f"after {step} steps",
        "to the control",
        *(f"{shown} at {length}, swapped" for length in lengths),
        *(f"{shown} at {length}, healed" for length in lengths),
        "seconds",
    ]
    rows = []
    control = _control(groups)
    for name, cells in groups.items():
        last = [cell["curve"]["value"][-1] for cell in cells]
        reference = {cell["seed"]: cell["curve"]["value"][-1] for cell in control}
        differences = [
            value - reference[cell["seed"]]
            for cell, value in zip(cells, last, strict=True)
            if cell["seed"] in reference
        ]
        rows.append(
            [
                name,
                str(len(cells)),
                _shown(estimate([cell["curve"]["value"][0] for cell in cells])),
                _shown(estimate(last)),
                "" if cells is control else _shown(estimate(differences), signed=True),
                *(_by_length(cells, "start_by_length", place, loss) for place in range(len(lengths))),
                *(_by_length(cells, "end_by_length", place, loss) for place in range(len(lengths))),
                f"{sum(cell['seconds'] for cell in cells) / len(cells):.0f}",
            ]
        )
    lines = ["| " + " | ".join(row) + " |" for row in (headers, ["---"] + ["---:"] * (len(headers) - 1), *rows)]
    notes = [
        f"- First and after: {first['quantity']} on held-out text while training, the first value before any step.",
        "- The control keeps its scheme and is trained as long on the same batches; its first value is the untouched "
        "model.",
        "- Intervals are 95 % (Student's t over seeds).",
    ]
    notes += [
        f"- `{name}` was trained for {cells[0]['curve']['step'][-1]} steps only, which is what its row shows."
        for name, cells in groups.items()
        if cells[0]["curve"]["step"][-1] != step
    ]
    notes += [
        f"- `{cell['name']}`, seed {cell['seed']}: {cell['reason']}" for cell in results["cells"] if "reason" in cell
    ]
    fits = [_fit_note(name, cells[0]) for name, cells in groups.items()]
    reasons = sorted({f"- `{name}`: {reason}" for name, cells in groups.items() for reason in cells[0]["reasons"]})
    text = [results["study"]["description"], "\n".join(lines), "\n".join([*notes, *filter(None, fits), *reasons])]
    return "\n\n".join(part for part in text if part)


def draw_figures(results: dict[str, Any], folder: Path) -> list[Path]:
    """Healing curves, and the measure by length before and after, as PNG and SVG."""
    groups = by_name(results)
    if not groups:
        return []
    labels = list(groups)
    first = next(iter(groups.values()))[0]
    quantity = textwrap.fill(first["quantity"], _LABEL_WIDTH)
    control = _control(groups)
    untouched = None if not control else ("untouched model", control[0]["curve"]["value"][0])
    curves = [
        _curve(name, cells[0]["curve"]["step"], [cell["curve"]["value"] for cell in cells])
        for name, cells in groups.items()
    ]
    figures = {
        "healing_curves": plot_curves(
            curves, x_label="training step", y_label=quantity, reference=untouched, labels=labels
        )
    }
    if len(first["lengths"]) > 1:
        for key, name in (("start_by_length", "by_length_swapped"), ("end_by_length", "by_length_healed")):
            curves = [
                _curve(label, cells[0]["lengths"], [cell[key] for cell in cells]) for label, cells in groups.items()
            ]
            figures[name] = plot_curves(
                curves, x_label="evaluated length (tokens)", y_label=quantity, labels=labels, log2_x=True
            )
    with styled():
        return [path for name, figure in figures.items() for path in save_figure(figure, folder, name)]


def _control(groups: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return next((cells for cells in groups.values() if cells[0]["control"]), [])


def _curve(label: str, x: list[int], values: list[list[float | None]]) -> Curve:
    estimates = [estimate(list(column)) for column in zip(*values, strict=True)]
    return Curve(
        label, tuple(x), tuple(found.mean for found in estimates), tuple(found.half_width for found in estimates)
    )


def _by_length(cells: list[dict[str, Any]], key: str, place: int, loss: bool) -> str:
    values = [cell[key][place] for cell in cells]
    if loss:
        values = [None if value is None else math.exp(min(value, 20.0)) for value in values]
    return _shown(estimate(values), digits=1 if loss else 4)


def _shown(found: Estimate, signed: bool = False, digits: int = 3) -> str:
    if found.mean is None:
        return "-"
    text = f"{found.mean:{'+' if signed else ''}.{digits}f}"
    return text if found.half_width is None else f"{text} ± {found.half_width:.{digits}f}"


def _fit_note(name: str, cell: dict[str, Any]) -> str:
    swap = cell["swap"]
    if swap is None or not (swap["fits"] or swap["options"]):
        return ""
    parts = [f"{option}={value} kept from the old scheme" for option, value in swap["options"].items()]
    known = [fit for fit in swap["fits"] if fit["residual"] is not None]
    if known:
        low, high = (bound(fit["residual"] for fit in known) for bound in (min, max))
        parts.append(
            f"{len(swap['fits'])} part(s) fitted to {swap['fits'][0]['target']}, missing {low:.0%}"
            + ("" if low == high else f" to {high:.0%}")
            + " of its root mean square"
        )
    elif swap["fits"]:
        parts.append(f"{len(swap['fits'])} part(s) fitted to {swap['fits'][0]['target']}")
    return f"- `{name}`: {'; '.join(parts)}."
