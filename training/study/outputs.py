"""Everything a study leaves for readers, made from its records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_posenc.report import Result
from training.errors import SettingsError
from training.files import read_json, write_json, write_text
from training.study.cards import study_cards, write_cards, write_model_cards
from training.study.figures import draw_figures, save_figures
from training.study.records import study_records
from training.study.report import format_report
from training.study.results import ResultsError, Study, check_results


def write_outputs(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes results, tables, plots, report and the cards of the saved models.

    Args:
        results: of a study, complete or not.
        folder: of the study. The models that the results name lie in it.

    Returns:
        The files: `results.json`, `table.md`, `plots/*`, `report.html`, and `README.md` in the folder of each model.

    Raises:
        ResultsError: for results that cannot be reported; then nothing is written.
    """
    study = check_results(results)
    records = study_records(study)
    figures = draw_figures(study, records)
    report = format_report(study, records, figures)
    cards = study_cards(study, records)
    write_json(folder / "results.json", results)
    write_text(folder / "table.md", format_tables(study, records))
    plots = save_figures(figures, folder / "plots")
    write_text(folder / "report.html", report)
    models = write_model_cards(cards, folder)
    return [folder / "results.json", folder / "table.md", *plots, folder / "report.html", *models]


def format_tables(study: Study, records: Mapping[str, Result]) -> str:
    """Markdown: a heading per task, its tables, how it was trained, and what could not be trained, with the reason."""
    head = [f"# {study.name}", study.description, f"Made by `{study.command}`."]
    return "\n\n".join([*filter(None, head), *(f"## {r.table(markdown=True)}" for r in records.values())]) + "\n"


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
        written = write_outputs(results, options.folder)
        if options.cards:
            study = check_results(results)
            written += write_cards(study_cards(study, study_records(study)), options.cards)
    except (SettingsError, ResultsError) as error:
        print(f"outputs: {error}", file=sys.stderr)
        return 2
    print(f"Written: {len(written)} files.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
