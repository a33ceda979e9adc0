"""Everything a study leaves for readers, in one call."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from training.errors import SettingsError
from training.files import read_json, write_json, write_text
from training.study.aggregation import aggregate
from training.study.cards import write_cards, write_model_cards
from training.study.figures import draw_figures, save_figures
from training.study.report import format_report
from training.study.schema import ResultsError
from training.study.tables import format_tables


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
    aggregates = aggregate(results)
    tables = format_tables(results)
    figures = draw_figures(results, aggregates)
    report = format_report(results, figures)
    write_json(folder / "results.json", results)
    write_text(folder / "table.md", tables)
    plots = save_figures(figures, folder / "plots")
    write_text(folder / "report.html", report)
    cards = write_model_cards(results, folder)
    return [folder / "results.json", folder / "table.md", *plots, folder / "report.html", *cards]


def main(arguments: list[str] | None = None) -> int:
    """Writes the outputs of an earlier study again, or copies its model cards. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes tables, plots, report and cards of a study from its results.")
    parser.add_argument("folder", type=Path, help="of the study, with its results.json")
    parser.add_argument("--cards", type=Path, help="also copy the cards of all trained models, with an index, to here")
    options = parser.parse_args(arguments)
    try:
        results = read_json(options.folder / "results.json")
    except SettingsError as error:
        print(f"outputs: {error}", file=sys.stderr)
        return 2
    if results is None:
        print(f"outputs: {options.folder} has no results.json; name the folder of a study.", file=sys.stderr)
        return 2
    try:
        written = write_outputs(results, options.folder)
        written += write_cards(results, options.cards) if options.cards else []
    except ResultsError as error:
        print(f"outputs: {error}", file=sys.stderr)
        return 2
    print(f"Written: {len(written)} files.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
