"""Imports hf_posenc when a Python process starts whose `PYTHONPATH` names this folder; see `hf_posenc.cli.running`.

Python runs the first `sitecustomize` it finds. The one that it would have run without this folder runs too.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def _import_plugin() -> None:
    """From the folder it lies in: this process may have another import path than the one that started it."""
    package = _FOLDER.parent
    spec = importlib.util.spec_from_file_location(
        package.name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    spec.loader.exec_module(module)


def _run_the_other_one() -> None:
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if _FOLDER.parent.name not in sys.modules:
        _import_plugin()
finally:
    _run_the_other_one()
