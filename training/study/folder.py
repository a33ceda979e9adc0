"""The output folder of a study, and checks that its content belongs to this run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from training.checkpoints import check_folder, differences
from training.errors import SettingsError
from training.files import read_json, write_json
from training.study.cells import DIVERGED, FINISHED, Cell

LOCK = ".lock"
#: The holder of a lease renews it every ten seconds. After this many seconds without renewal, it counts as dead. On the
#: same machine, the death of a process is noticed at once.
_LEASE_SECONDS = 30


def lease_of(cell: Cell, on_loss: Callable[[], None] = lambda: None) -> SoftFileLease:
    """Returns the lease for training a cell. Locks of a shared file system might not reach other nodes."""
    path, seconds = cell.folder / LOCK, _LEASE_SECONDS
    return SoftFileLease(path, lease_duration=seconds, thread_local=False, on_compromise=lambda _: on_loss())


def is_free(lease: SoftFileLease, keep: bool = False) -> bool:
    """Whether no other process holds a lease."""
    try:
        lease.acquire(timeout=0)
    except Timeout:
        return False
    if not keep:
        lease.release()
    return True


@contextmanager
def taken(folder: Path, writes: bool) -> Iterator[None]:
    """Locks an output folder while shared files of all training runs are written. Waits for other processes.

    A study uses common names there (`data`, `models`, `results.json`), so a folder with other content is refused.
    """
    begun = (folder / LOCK).exists() or (folder / "trainings").is_dir()
    check_folder(folder, begun, "does not contain a study: it has no trainings/")
    folder.mkdir(parents=True, exist_ok=True)
    if not writes:
        yield
        return
    with SoftFileLease(folder / LOCK, lease_duration=_LEASE_SECONDS):
        yield


def check_cells(cells: list[Cell], digests: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Compares training runs with the settings they began with. If all are equal, records the settings of new ones.

    Returns:
        The settings of each training, by its name.
    """
    new: dict[Path, dict[str, Any]] = {}
    identities = {cell.name: cell.identity(digests) for cell in cells}
    starts = {cell.start.name for cell in cells if cell.start is not None and cell.result() is None}
    for cell in cells:
        path, wanted, result = cell.folder / "settings.json", identities[cell.name], cell.result()
        earlier = read_json(path)
        changed = [] if earlier is None else differences(earlier, wanted)
        if earlier is None or (changed and not _has_trained(cell)):
            new[path] = wanted
        elif changed:
            raise SettingsError(
                f"{cell.name} in {cell.study.output_dir} was started with other settings: {'; '.join(changed)}. "
                "Results of different settings cannot be in one table. Choose another --output_dir, restore the "
                f"earlier settings to resume, or remove {cell.folder} to train it again."
            )
        needed = cell.study.save_models or cell.name in starts
        if needed and result and result["status"] == FINISHED and not cell.model_folder.exists():
            raise SettingsError(
                f"{cell.name} is finished in {cell.study.output_dir}, but its model is missing. Remove {cell.folder} "
                "to train it again with the same result, omit --save_models (or the schemes that start from it), or "
                "choose another --output_dir."
            )
    for path, wanted in new.items():
        # The result of a scheme that could not be trained, perhaps because of an error in its code.
        path.with_name("result.json").unlink(missing_ok=True)
        write_json(path, wanted)
    return identities


def _has_trained(cell: Cell) -> bool:
    """Whether a training has figures or a checkpoint to resume from, or is running."""
    result = cell.result()
    has_figures = result is not None and result["status"] in (FINISHED, DIVERGED)
    return has_figures or any(cell.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")) or not is_free(lease_of(cell))
