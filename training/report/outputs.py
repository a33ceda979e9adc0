"""Writes all reports of a study from its results."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hf_posenc.report import Result
from hf_posenc.report.page import marked_up, web_page
from training.files import write_text
from training.report.cards import study_cards
from training.report.figures import StudyFigure, draw_figures
from training.report.records import study_records
from training.report.results import Study, check_results
from training.report.summary import study_summary

_TEMPLATE = Path(__file__).with_name("report_template.html")


def write_outputs(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes results, tables, plots, report and the cards of the saved models.

    Returns:
        The files: `results.json`, `table.md`, `plots/*`, `report.html`, and `README.md` in the folder of each model.
    """
    study = check_results(results, folder / "results.json")
    records = study_records(study)
    figures = draw_figures(study, records)
    texts = {
        folder / "results.json": json.dumps(results, indent=1, allow_nan=False) + "\n",
        folder / "table.md": format_tables(study, records),
        folder / "report.html": _page(study, records, figures),
    }
    for card in study_cards(study, records):
        texts |= {folder / model / "README.md": card.text for model in card.models if (folder / model).is_dir()}
    plots = {folder / "plots" / f"{figure.name}.png": figure.png for figure in figures}
    plots |= {folder / "plots" / f"{figure.name}_dark.png": figure.dark_png for figure in figures}
    for path, text in texts.items():
        write_text(path, text)
    for path, image in plots.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image)
    return [*texts, *plots]


def format_tables(study: Study, records: Mapping[str, Result]) -> str:
    """Returns Markdown: for each task its tables, how it was trained, and what could not be trained, with reasons."""
    head = [f"# {study.name}", study.description, f"Made by `{study.command}`.", "## What was seen"]
    for first, *others in study_summary(study, records).values():
        head += [first, "\n".join(f"- {sentence}" for sentence in others)]
    return "\n\n".join([*filter(None, head), *(f"## {r.table(markdown=True)}" for r in records.values())]) + "\n"


def _page(study: Study, records: Mapping[str, Result], figures: Sequence[StudyFigure]) -> str:
    """Returns the study as one self-contained HTML page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["base64"] = lambda image: base64.b64encode(image).decode()
    environment.filters["tables"] = lambda result: Markup(replace(result, title="").html().replace("h2>", "h3>"))
    environment.filters["marked_up"] = lambda text: Markup(marked_up(text))
    listings = {name: getattr(study, name) for name in ("corpus", "settings", "versions", "machine")}
    body = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        study=study,
        seen=study_summary(study, records),
        results=list(records.values()),
        figures=figures,
        listings={name: json.dumps(listing, indent=1, ensure_ascii=False) for name, listing in listings.items()},
    )
    return web_page(f"Study {study.name}", body)
