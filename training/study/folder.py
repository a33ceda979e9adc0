"""The output folder: who may write to it, and whether what is in it fits this run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from training.checkpoints import differences
from training.errors import SettingsError
from training.files import read_json, write_json
from training.study.cells import FINISHED, Cell

_LOCK = ".lock"
_CONTENTS = ("data", "trainings", "models", "plots", "results.json", "table.md", "report.html")


def check_folder(folder: Path) -> None:
    """Refuses a folder that is none of a study's; writes nothing.

    A study takes common names there (`data`, `models`), and --overwrite removes them.

    Raises:
        SettingsError: for a file, or a folder with something else in it.
    """
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"--output_dir {folder} is a file; a folder is expected.")
    if not folder.exists() or (folder / _LOCK).exists() or (folder / "trainings").is_dir():
        return
    found = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if found:
        raise SettingsError(
            f"{folder} is not empty ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''}), and what is in it is "
            "no study: it has no trainings/. Name another --output_dir."
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Takes the folder for this run; the lock falls with the process, however it ends.

    Raises:
        SettingsError: if another run is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = FileLock(folder / _LOCK)
    try:
        taken.acquire(timeout=0)
    except Timeout as error:
        raise SettingsError(
            f"Another study is writing to {folder}. Wait for it, or name another --output_dir."
        ) from error
    try:
        yield
    finally:
        taken.release()


def clear(folder: Path) -> None:
    """Removes what an earlier study left, and nothing else."""
    for name in _CONTENTS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_cell(cell: Cell, digests: dict[str, str]) -> None:
    """Compares with what this training began with, or records it.

    Every training stands for itself: a study may be asked for more schemes, tasks and seeds in the same folder.

    Args:
        cell: the training.
        digests: of the text ("corpus") and of pretrained weights ("model"), where there are any.

    Raises:
        SettingsError: if a setting or the text itself differs, or if the training has ended without the model that is
            now asked for.
    """
    path = cell.folder / "settings.json"
    wanted = cell.identity(digests)
    earlier = read_json(path)
    if earlier is None:
        write_json(path, wanted)
    elif changed := differences(earlier, wanted):
        raise SettingsError(
            f"{cell.name} in {cell.study.output_dir} began with other settings: {'; '.join(changed)}. Results of "
            "different settings cannot stand in one table. Name another --output_dir, go back to the earlier settings "
            "to resume, or start anew with --overwrite."
        )
    result = cell.result()
    if cell.keeps_model and result and result["status"] == FINISHED and not cell.model_folder.exists():
        raise SettingsError(
            f"{cell.name} has ended in {cell.study.output_dir} without --save_models, so its model is gone. Drop "
            "--save_models (or the schemes that start from it), name another --output_dir, or start anew with "
            "--overwrite."
        )
