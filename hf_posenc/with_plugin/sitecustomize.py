"""Imports hf_posenc at the start of Python processes with this folder in `PYTHONPATH`; see `hf_posenc.cli.running`.

Python runs the first `sitecustomize` that it finds. The one that it would find without this folder is run afterwards.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def _import_plugin() -> None:
    """Imports hf_posenc from the parent folder, because this process may have a different import path."""
    package = _FOLDER.parent
    file = package / "__init__.py"
    spec = importlib.util.spec_from_file_location(package.name, file, submodule_search_locations=[str(package)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    spec.loader.exec_module(module)


def _run_next_sitecustomize() -> None:
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
    _run_next_sitecustomize()
