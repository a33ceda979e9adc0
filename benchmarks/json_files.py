"""Writing results: whole files only, with a line for each entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a kill at any moment leaves either the old one or the new one.

    Raises:
        BenchmarkError: if the system does not let it.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise BenchmarkError(
            f"{path} cannot be written ({error.strerror or error}). Choose another --output_dir, or make room or "
            "permission for this one."
        ) from error


def with_lines(value: Any, depth: int) -> str:
    """JSON with one line per entry down to a depth, and compact below it; NaN, which JSON lacks, is an error."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, allow_nan=False)
    if isinstance(value, dict):
        inside = [f"{json.dumps(name)}: {with_lines(one, depth - 1)}" for name, one in value.items()]
        return "{\n" + ",\n".join(inside) + "\n}"
    return "[\n" + ",\n".join(with_lines(one, depth - 1) for one in value) + "\n]"
