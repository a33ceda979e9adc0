"""The study as one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from PIL import Image

from training.study.aggregation import Aggregate, aggregate, of_task
from training.study.figures import StudyFigure, draw_figures
from training.study.schema import FINISHED
from training.study.summary import task_findings
from training.study.tables import scheme_text, task_tables, task_text, task_title, unfinished_lines

_TEMPLATE = Path(__file__).with_name("report_template.html")
#: Dots per inch of the embedded images: sharp at twice the width of the page's column, still small.
_DPI = 150
_PALETTE = 256


def format_report(results: dict[str, Any], figures: Sequence[StudyFigure] | None = None) -> str:
    """The page: what was trained with which command, per task findings, tables and figures, failures, settings.

    Args:
        results: of a study.
        figures: of these results, where they were drawn before.

    Raises:
        ResultsError: for results that `check_results` refuses.
    """
    aggregates = aggregate(results)
    drawn = draw_figures(results, aggregates) if figures is None else figures
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["code"] = _with_code
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        name=results["name"],
        overview=_overview(results),
        command=results["command"],
        tasks=[_task(results, name, aggregates, drawn) for name in results["tasks"] if of_task(aggregates, name)],
        unfinished=[f"{item.task}, `{item.scheme}`, {line}" for item in aggregates for line in unfinished_lines(item)],
        schemes=_schemes(aggregates),
        listings=[
            ("data", "Data", _listing(results["corpus"] or {})),
            ("settings", "Settings", _listing(results["settings"])),
            ("machine", "Versions and machine", _listing(results["versions"]) + _listing(results["machine"])),
        ],
    )


def _overview(results: dict[str, Any]) -> str:
    runs = results["runs"]
    finished = sum(run["status"] == FINISHED for run in runs)
    seconds = sum(run["seconds"] for run in runs if run["status"] == FINISHED)
    counts = [
        (len({run["scheme"] for run in runs}), "scheme"),
        (len({run["task"] for run in runs}), "task"),
        (len({run["seed"] for run in runs}), "seed"),
    ]
    named = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)
    return f"{named}: {len(runs)} runs, of which {finished} finished, in {_duration(seconds)} of training altogether."


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _task(
    results: dict[str, Any], name: str, aggregates: Sequence[Aggregate], figures: Sequence[StudyFigure]
) -> dict[str, Any]:
    task, found = results["tasks"][name], of_task(aggregates, name)
    return {
        "anchor": f"task-{re.sub(r'[^a-zA-Z0-9_-]+', '-', name)}",
        "title": task_title(name, task),
        "text": task_text(task),
        "findings": task_findings(task, found),
        "tables": task_tables(name, task, found),
        "figures": [_embedded(figure) for figure in figures if figure.task == name],
    }


def _embedded(figure: StudyFigure) -> dict[str, Any]:
    buffer = io.BytesIO()
    figure.figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    with Image.open(buffer) as image:
        reduced = image.convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE)
    small = io.BytesIO()
    reduced.save(small, format="png", optimize=True)
    return {
        "name": figure.name,
        "title": figure.title,
        "reading": figure.reading,
        "alternative": figure.alternative,
        "data": base64.b64encode(small.getvalue()).decode("ascii"),
        "width": reduced.width,
        "height": reduced.height,
    }


def _schemes(aggregates: Sequence[Aggregate]) -> list[tuple[str, str, str]]:
    """Label, tasks and scheme; a label that means another config in another task has a row for each."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for item in aggregates:
        tasks.setdefault((item.scheme, scheme_text(item)), []).append(item.task)
    return [(label, ", ".join(names), text) for (label, text), names in tasks.items()]


def _listing(entries: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, _value(value)) for key, value in entries.items()]


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(str, value))
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _with_code(text: str) -> Markup:
    """Escaped text in which what stands between backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
