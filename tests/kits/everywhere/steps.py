"""Folders that are made once: checkpoints and exports, which take most of the time."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MADE = "made.json"


class Steps:
    """Folders below one folder.

    Args:
        root: the folder.
        machine: of `describe_machine`.
    """

    def __init__(self, root: Path, machine: Mapping[str, Any]) -> None:
        self.root, self.machine = root, dict(machine)

    def folder(self, name: str, settings: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
        """The folder `name`, made if it does not exist or was made with other settings.

        Args:
            name: relative to the root.
            settings: everything that the content depends on. JSON-ready.
            make: is given the path of the folder, which does not exist.
        """
        place = self.root / name
        wanted = json.loads(json.dumps(dict(settings)))
        if _read(place / _MADE).get("settings") != wanted:
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            started = time.monotonic()
            make(place)
            seconds = time.monotonic() - started
            print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
            # Written last, so that an interrupted step starts again.
            (place / _MADE).write_text(json.dumps({"settings": wanted, "seconds": seconds}))
        return place

    def seconds(self, place: Path) -> float:
        """How long it took to make a folder."""
        return float(_read(place / _MADE)["seconds"])


def file_name(words: str) -> str:
    """A name in a table as a part of the name of a file."""
    return words.replace(", ", "-").replace(" ", "-")


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content
