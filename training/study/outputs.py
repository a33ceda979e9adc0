"""Everything a study leaves for readers, made from its results."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, which has modules of common names

import jinja2
from markupsafe import Markup

from hf_posenc.report import Result
from hf_posenc.report.page import marked_up, web_page
from training.errors import SettingsError
from training.files import read_json, write_json, write_text
from training.study.cards import study_cards, write_index
from training.study.figures import StudyFigure, draw_figures
from training.study.records import study_records
from training.study.results import ResultsError, Study, check_results
from training.study.summary import study_summary

_TEMPLATE = Path(__file__).with_name("report_template.html")


def write_outputs(results: dict[str, Any], folder: Path, cards: Path | None = None) -> list[Path]:
    """Writes results, tables, plots, report and the cards of the saved models.

    Args:
        results: of a study, complete or not.
        folder: of the study. The models that the results name lie in it; one that does not gets no card.
        cards: a folder for copies of all cards, with an index; `None` for no copies.

    Returns:
        The files: `results.json`, `table.md`, `plots/*`, `report.html`, and `README.md` in the folder of each model.

    Raises:
        ResultsError: for results that cannot be reported; then nothing is written.
    """
    study = check_results(results)
    records = study_records(study)
    figures = draw_figures(study, records)
    texts = {folder / "table.md": format_tables(study, records), folder / "report.html": _page(study, records, figures)}
    for card in study_cards(study, records):
        texts |= {folder / model / "README.md": card.text for model in card.models if (folder / model).is_dir()}
        texts |= {cards / f"{card.name}.md": card.text} if cards is not None else {}
    plots = {folder / "plots" / f"{figure.name}.png": figure.png for figure in figures}
    plots |= {folder / "plots" / f"{figure.name}_dark.png": figure.dark_png for figure in figures}
    write_json(folder / "results.json", results)
    for path, text in texts.items():
        write_text(path, text)
    for path, image in plots.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image)
    return [folder / "results.json", *texts, *plots, *([] if cards is None else [write_index(cards)])]


def format_tables(study: Study, records: Mapping[str, Result]) -> str:
    """Markdown: a heading per task, its tables, how it was trained, and what could not be trained, with the reason."""
    head = [f"# {study.name}", study.description, f"Made by `{study.command}`.", "## What was seen"]
    for first, *others in study_summary(study, records).values():
        head += [first, "\n".join(f"- {sentence}" for sentence in others)]
    return "\n\n".join([*filter(None, head), *(f"## {r.table(markdown=True)}" for r in records.values())]) + "\n"


def _page(study: Study, records: Mapping[str, Result], figures: Sequence[StudyFigure]) -> str:
    """The study as one HTML page that needs nothing beside it."""
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


def main(arguments: list[str] | None = None) -> int:
    """Writes the outputs of an earlier study again, or copies its model cards. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes tables, plots, report and cards of a study from its results.")
    parser.add_argument("folder", type=Path, help="of the study, with its results.json")
    parser.add_argument("--cards", type=Path, help="also copy the cards of all trained models, with an index, to here")
    options = parser.parse_args(arguments)
    try:
        results = read_json(options.folder / "results.json")
        if results is None:
            raise SettingsError(f"{options.folder} has no results.json; name the folder of a study.")
        written = write_outputs(results, options.folder, options.cards)
    except (SettingsError, ResultsError) as error:
        print(f"outputs: {error}", file=sys.stderr)
        return 2
    print(f"Written: {len(written)} files.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
