"""Writing so that a kill at any moment leaves either the old file or the new one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from training.errors import SettingsError

_PREFIX = "checkpoint-"


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically; NaN, which JSON does not have, is an error."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Reads what `write_json` wrote; `None` where there is no file.

    Raises:
        SettingsError: for a file that was cut off or changed since.
    """
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(
            f"{path} cannot be read ({error}): it was cut off or changed since it was written. Remove it, and run the "
            "same command again to make what it held anew."
        ) from error


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Saves accelerate's state as `folder/checkpoint-STEP`, then drops the earlier ones."""
    partial = folder / f"partial-{step}"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        earlier = _checkpoints(folder)
        target = folder / f"{_PREFIX}{step}"
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in earlier:
            if old != target:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or `None`."""
    checkpoints = _checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def remove_checkpoints(folder: Path) -> None:
    """Drops every checkpoint, complete or not."""
    for pattern in (f"{_PREFIX}*", "partial-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*"), key=lambda path: int(path.name.removeprefix(_PREFIX)))
