"""Steps that are skipped when their results exist."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_posenc.report import Record

_MADE = "made.json"


class Steps:
    """Folders and measurements below one folder.

    Args:
        root: the folder.
        machine: of `describe_machine`. What another machine or other code has measured is measured again.
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
            seconds = _timed(name, lambda: make(place))
            # Written last, so that an interrupted step starts again.
            (place / _MADE).write_text(json.dumps({"settings": wanted, "seconds": seconds}))
        return place

    def seconds(self, place: Path) -> float:
        """How long it took to make a folder."""
        return float(_read(place / _MADE)["seconds"])

    def measured(self, name: str, settings: Mapping[str, Any], measure: Callable[[], Sequence[Record]]) -> list[Record]:
        """The records of a measurement, measured if there are none or if they are of elsewhere.

        Args:
            name: of the measurement.
            settings: everything that it depends on beside the machine. JSON-ready.
            measure: measures.
        """
        path = self.root / "measured" / f"{name}.json"
        wanted = json.loads(json.dumps({"machine": self.machine, **settings}))
        if _read(path).get("settings") != wanted:
            records: list[Record] = []
            seconds = _timed(name, lambda: records.extend(measure()))
            content = {"settings": wanted, "seconds": seconds, "records": [asdict(record) for record in records]}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, allow_nan=False))
        return [Record(**record) for record in _read(path)["records"]]


def file_name(words: str) -> str:
    """A name in a table as a part of the name of a file."""
    return words.replace(", ", "-").replace(" ", "-")


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def _timed(name: str, work: Callable[[], None]) -> float:
    started = time.monotonic()
    work()
    seconds = time.monotonic() - started
    print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return seconds
