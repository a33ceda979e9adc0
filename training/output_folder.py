"""The output folder: who may write to it, and whether what is in it fits this run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from training.files import read_json, write_json
from training.loop import FINISHED, Training
from training.settings import CompareSettings, SettingsError

_CONTENTS = ("data", "trainings", "models", "plots", "settings.json", "results.json", "table.md")


def lock(folder: Path) -> FileLock:
    """Takes the folder for this run; the lock falls with the process, however it ends.

    Raises:
        SettingsError: if another run is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = FileLock(folder / ".lock")
    try:
        taken.acquire(timeout=0)
    except Timeout as error:
        raise SettingsError(
            f"Another comparison is writing to {folder}. Wait for it, or name another --output_dir."
        ) from error
    return taken


def clear(folder: Path) -> None:
    """Removes what an earlier comparison left, and nothing else."""
    for name in _CONTENTS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_settings(settings: CompareSettings, corpus: dict[str, Any]) -> None:
    """Compares with the run that began in this folder, or records that this one did.

    Schemes and tasks may differ, because every training stands for itself.

    Raises:
        SettingsError: if a setting or the text itself differs.
    """
    path = Path(settings.output_dir) / "settings.json"
    wanted = {**settings.fingerprint(), "corpus digest": corpus["digest"]}
    earlier = read_json(path)
    if earlier is None:
        write_json(path, wanted)
        return
    differing = [
        f"{name} was {earlier.get(name)!r} and is now {wanted.get(name)!r}"
        for name in sorted({*earlier, *wanted})
        if earlier.get(name) != wanted.get(name)
    ]
    if differing:
        raise SettingsError(_explain(settings.output_dir, differing))


def check_training(training: Training) -> None:
    """Compares the scheme's options with those that this training began with, or records them.

    Raises:
        SettingsError: if they differ, or if the training has ended without the model that is now asked for.
    """
    path = training.folder / "scheme.json"
    earlier = read_json(path)
    if earlier is None:
        write_json(path, training.options)
    elif earlier != training.options:
        raise SettingsError(
            _explain(
                training.settings.output_dir,
                [f"the options of {training.scheme!r} were {earlier} and are now {training.options}"],
            )
        )
    result = training.result()
    model = Path(training.settings.output_dir) / "models" / training.name
    if training.settings.save_models and result and result["status"] == FINISHED and not model.exists():
        raise SettingsError(
            f"{training.name} has ended in {training.settings.output_dir} without --save_models, so its model is gone. "
            "Drop --save_models, name another --output_dir, or start anew with --overwrite."
        )


def _explain(folder: str, differing: list[str]) -> str:
    return (
        f"{folder} holds a comparison with other settings: {'; '.join(differing)}. Results of different settings "
        "cannot stand in one table. Name another --output_dir, go back to the earlier settings to resume, or start "
        "anew with --overwrite."
    )
