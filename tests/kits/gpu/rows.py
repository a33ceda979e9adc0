"""The results of a part: a file of JSON lines, each written immediately. Only needs the standard library.

A line with `machine` and `settings` begins every run of a part. Every other line is the row of a cell, and the last row
of a cell counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError

#: Statuses of a row. WRONG: computed, but different from the reference. CRASHED: raised an error that is not a refusal
#: of the library. A check that would not notice a missing scheme is inconclusive.
OK, WRONG, REFUSED, CRASHED, SKIPPED, CANNOT_TELL = "ok", "WRONG", "refused", "crashed", "skipped", "cannot tell"
STATUSES = (WRONG, CRASHED, REFUSED, SKIPPED, CANNOT_TELL, OK)

Row = dict[str, Any]


class PartFile:
    """The file of a part.

    Raises:
        BenchmarkError: if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The machine and the settings of each run of the part.
        self.headers: list[dict[str, Any]] = []
        #: By cell.
        self.rows: dict[str, Row] = {}
        content = path.read_bytes() if path.exists() else b""
        # A line without an end was cut off when the machine went down. The first line that is added takes its place.
        self._whole = content.rfind(b"\n") + 1
        try:
            for line in content[: self._whole].splitlines():
                self._keep(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchmarkError(
                f"{path} cannot be read ({error!r}): it was changed since it was written. Remove it, and this part is "
                "run anew."
            ) from error

    @property
    def left(self) -> list[str]:
        """The cells that have no row."""
        return [cell for cell in self.headers[-1]["cells"] if cell not in self.rows] if self.headers else []

    def add(self, line: dict[str, Any]) -> None:
        """Writes a line."""
        text = json.dumps(line, allow_nan=False)
        with self.path.open("ab") as file:
            file.truncate(self._whole)
            self._whole += file.write(f"{text}\n".encode())
        # As it will be read.
        self._keep(json.loads(text))

    def clear(self) -> None:
        """Forgets everything, and removes the file."""
        self.path.unlink(missing_ok=True)
        self._whole = 0
        self.headers.clear()
        self.rows.clear()

    def _keep(self, line: dict[str, Any]) -> None:
        if "machine" in line:
            self.headers.append(line)
        else:
            self.rows[line["cell"]] = line
