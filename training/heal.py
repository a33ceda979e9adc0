"""Swaps the position encoding of a pretrained model in several ways, heals each, and compares them with a control.

    python training/heal.py training/studies/heal_splade.yaml --output_dir outputs/heal_splade

The settings name the model, the text, one list of cells (a scheme and how it is healed) and the seeds. Finished cells
are kept, an interrupted one goes on where it was: run the same command again. `results.json`, `table.md` and `plots/`
are written after every cell.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

import hf_posenc
from hf_posenc import PositionEncodingError
from training.errors import SettingsError
from training.files import read_json, write_json
from training.healing.embedding import run_embedding_cell
from training.healing.language import run_language_cell
from training.healing.report import write_outputs
from training.healing.study import Cell, StudyArguments, parse_study
from training.language_modeling import exit_status
from training.launched import launched_processes
from training.trainer import TrainingError


def run_study(study: StudyArguments, folder: Path, cells: list[Cell]) -> dict[str, Any]:
    """Trains what is missing and writes the outputs after every cell.

    A cell that had to stop (its loss became no number, its swap is impossible) is recorded with the reason, and the
    others go on; the same command tries it again.

    Args:
        study: what is measured.
        folder: of the study.
        cells: what is trained.

    Returns:
        The content of `results.json`.

    Raises:
        SettingsError: if the folder holds a cell of the same name and other settings; nothing is trained then.
    """
    finished = {cell.folder: _finished(folder, cell) for cell in cells}
    results: dict[str, Any] = {
        "study": {
            "objective": study.objective,
            "model": Path(str(cells[0].given.model.model_name_or_path)).name,
            "description": study.description,
            "versions": {
                "hf_posenc": hf_posenc.__version__,
                "transformers": transformers.__version__,
                "torch": torch.__version__,
            },
        },
        "cells": [],
    }
    for number, cell in enumerate(cells, start=1):
        print(f"[{number}/{len(cells)}] {cell.name}, seed {cell.seed}", file=sys.stderr, flush=True)
        found = finished[cell.folder] or _run(cell, folder)
        results["cells"].append(found)
        write_outputs(results, folder)
    return results


def _run(cell: Cell, folder: Path) -> dict[str, Any]:
    entry = {"name": cell.name, "seed": cell.seed, "control": cell.is_control, "settings": _portable(cell)}
    run = run_embedding_cell if cell.study.objective == "embedding" else run_language_cell
    try:
        found = entry | {"status": "finished"} | run(cell)
    except (SettingsError, TrainingError, PositionEncodingError) as error:
        print(f"    stopped: {error}", file=sys.stderr)
        return entry | {"status": "stopped", "reason": str(error)}
    own = folder / cell.folder
    write_json(own / "result.json", found)
    for checkpoint in own.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    if not cell.study.keep_models:
        for weights in own.rglob("*.safetensors"):
            weights.unlink()
    return found


def _finished(folder: Path, cell: Cell) -> dict[str, Any] | None:
    found: dict[str, Any] | None = read_json(folder / cell.folder / "result.json")
    if found is None:
        return None
    before, now = found["settings"], _portable(cell)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise SettingsError(
            f"{folder / cell.folder} holds a finished cell with other settings: {changed[0]} was "
            f"{before.get(changed[0])!r} and is {now.get(changed[0])!r}. Remove that folder to train it anew, or name "
            "another --output_dir."
        )
    return found


def _portable(cell: Cell) -> dict[str, Any]:
    """The settings, without the folder a model lies in."""
    settings = cell.settings()
    settings["model_name_or_path"] = Path(str(settings["model_name_or_path"])).name
    return settings


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments

    def run() -> None:
        if launched_processes() > 1:
            raise SettingsError(
                f"{launched_processes()} processes were launched, and a study trains and writes in one: its batches "
                "are not dealt out. Run `python training/heal.py`, or launch one process."
            )
        study, output_dir, cells = parse_study(words, __doc__)
        results = run_study(study, Path(output_dir), cells)
        stopped = [cell["name"] for cell in results["cells"] if cell["status"] != "finished"]
        print((Path(output_dir) / "table.md").read_text(encoding="utf-8"))
        if stopped:
            raise TrainingError(f"{len(stopped)} cell(s) had to stop: {', '.join(dict.fromkeys(stopped))}.")

    return exit_status("heal", run)


if __name__ == "__main__":
    sys.exit(main())
