"""The study as one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from PIL import Image

from hf_posenc.report import Result
from hf_posenc.report.rendering import table_cells
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.registry import scheme_from_dict
from training.study.figures import StudyFigure
from training.study.findings import task_findings
from training.study.results import Finished, Study, Task
from training.study.wording import unfinished_lines

_TEMPLATE = Path(__file__).with_name("report_template.html")
#: Dots per inch of the embedded images: sharp at twice the width of the page's column, still small.
_DPI = 150
_PALETTE = 256


def format_report(study: Study, records: Mapping[str, Result], figures: Sequence[StudyFigure]) -> str:
    """The page: what was trained with which command, per task findings, tables and figures, failures, settings.

    Args:
        study: its results.
        records: one result per task.
        figures: of these results.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["code"] = _with_code
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    seconds = sum(run.seconds for run in study.runs if isinstance(run, Finished))
    return template.render(
        name=study.name,
        overview=study.description,
        runs=len(study.runs),
        finished=sum(isinstance(run, Finished) for run in study.runs),
        schemes_count=len({run.scheme for run in study.runs}),
        seeds_count=len({run.seed for run in study.runs}),
        minutes=seconds / 60,
        command=study.command,
        tasks=[_task(study.tasks[name], result, figures) for name, result in records.items()],
        unfinished=[
            f"{name}, `{label}`, {line}"
            for name, result in records.items()
            for label in result.labels
            for line in unfinished_lines([run for run in study.runs if (run.task, run.scheme) == (name, label)])
        ],
        schemes=_schemes(records),
        listings=[
            ("data", "Data", _listing(study.corpus.model_dump() if study.corpus else {})),
            ("settings", "Settings", _listing(study.settings)),
            ("machine", "Versions and machine", _listing(study.versions) + _listing(study.machine)),
        ],
    )


def _task(task: Task, result: Result, figures: Sequence[StudyFigure]) -> dict[str, Any]:
    tables, notes = table_cells(result)
    return {
        "anchor": f"task-{re.sub(r'[^a-zA-Z0-9_-]+', '-', result.task)}",
        "title": result.title,
        "findings": task_findings(task, result),
        "tables": [
            {"title": view.title or "Seeds", "headers": headers, "rows": rows}
            for view, (headers, rows) in zip(result.views, tables, strict=True)
        ],
        "notes": notes,
        "figures": [_embedded(figure) for figure in figures if figure.task == result.task],
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


def _schemes(records: Mapping[str, Result]) -> list[tuple[str, str, str]]:
    """Label, tasks and scheme; a label that means another config in another task has a row for each."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for name, result in records.items():
        for subject in result.subjects:
            text = (
                "the unpatched model"
                if subject.config is None
                else scheme_label(scheme_from_dict(dict(subject.config)))
            )
            tasks.setdefault((subject.label, text), []).append(name)
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
