"""Executes the notebooks of this folder and stores their outputs.

    python docs/tutorials/execute.py [NAME ...]

What differs from run to run is removed (execution times, ids of cells, messages on stderr),
so that a change of a notebook shows what has changed in it.
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parent


def executed(path: Path, timeout: int = 600) -> Any:
    """The notebook with fresh outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    here = {"metadata": {"path": FOLDER}}
    NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources=here
    ).execute()
    return normalized(notebook)


def normalized(notebook: Any) -> Any:
    """The notebook without what differs from run to run or from machine to machine."""
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            # Loggers and progress bars write to stderr, about the machine and not about the subject.
            cell.outputs = _merged(
                [one for one in cell.outputs if one.get("name") != "stderr"]
            )
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data = {"image/png": _smaller(output.data["image/png"])}
    return notebook


def _merged(outputs: list[Any]) -> list[Any]:
    """Joins printed text that follows other printed text, however the kernel has cut it."""
    merged: list[Any] = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _smaller(png: str) -> str:
    """A figure in base64 with a palette of 128 colours, which takes a third of the space."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        reduced = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    reduced.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{Path(name).stem}.ipynb"
        nbformat.write(executed(path), path)
        print(path.name, f"{path.stat().st_size / 1024:.0f} KB")
