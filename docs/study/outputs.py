"""Writes the outputs of an earlier study again, and copies its model cards.

python docs/study/outputs.py STUDY --cards model_cards
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, which has modules of common names

from training.errors import SettingsError
from training.files import read_json, write_text
from training.report.cards import TEMPLATE, study_cards
from training.report.outputs import write_outputs
from training.report.records import study_records
from training.report.results import Study, check_results


def copy_cards(study: Study, folder: Path) -> None:
    """Copies the cards of all trained models, and writes the index of all cards there, also of other studies."""
    for card in study_cards(study, study_records(study)):
        write_text(folder / f"{card.name}.md", card.text)
    names = sorted(path.stem for path in folder.glob("*.md") if path.name not in ("README.md", TEMPLATE.name))
    listed = "\n".join(f"- [{name}]({name}.md)" for name in names)
    write_text(
        folder / "README.md",
        "# Model cards\n\nOne card per scheme and task of the studies in `docs/`, for the models of all seeds, written "
        "by\n`python docs/study/outputs.py STUDY --cards FOLDER` from the results of a study. The weights are not "
        f"in this\nrepository: each card has the command that makes them.\n\n{listed}\n",
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes tables, plots, report and cards of a study from its results.")
    parser.add_argument("folder", type=Path, help="of the study, with its results.json")
    parser.add_argument("--cards", type=Path, help="also copy the cards of all trained models, with an index, to here")
    options = parser.parse_args(arguments)
    try:
        results = read_json(options.folder / "results.json")
        if results is None:
            raise SettingsError(f"{options.folder} has no results.json; name the folder of a study.")
        written = write_outputs(results, options.folder)
        if options.cards is not None:
            copy_cards(check_results(results), options.cards)
    except SettingsError as error:
        print(f"outputs: {error}", file=sys.stderr)
        return 2
    print(f"Written: {len(written)} files.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
