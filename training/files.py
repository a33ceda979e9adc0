"""Atomic writing: if the process is killed, either the old file or the new one remains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.errors import SettingsError


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically. NaN raises an error, because JSON does not have it."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _no_number(name: str) -> None:
    raise ValueError(f"it contains {name}, which is not a number in JSON")


def read_json(path: Path) -> Any:
    """Reads a file from `write_json`; `None` if there is no file."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__}, not named values")
        return content
    except ValueError as error:
        raise SettingsError(
            f"{path} cannot be read ({error}): it was cut off, or changed after it was written. Remove it and run the "
            "same command again to create it again."
        ) from error
