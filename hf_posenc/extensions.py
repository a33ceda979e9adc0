"""Third-party modules that register schemes or architectures, in this process and in its child processes.

An environment variable holds their names, so that child processes inherit them. They are imported when a scheme or an
architecture is first looked up, so other processes have no overhead.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable

from hf_posenc.errors import PositionEncodingError

#: Comma-separated names of modules.
MODULES = "HF_POSENC_IMPORT"
#: Folders to search after the import path: the working folders at the time the modules were named.
FOLDERS = "HF_POSENC_IMPORT_FROM"

_lock = threading.RLock()
_imported: str | None = None


class ExtensionError(PositionEncodingError, ImportError):
    """A module given with `--import` does not exist."""


def name_modules(names: Iterable[str]) -> None:
    """Adds module names to the environment of this process. The modules may be in the working folder.

    Raises:
        ExtensionError: for a module that does not exist.
    """
    added = [name for name in names if name not in _named()]
    if not added:
        return
    folders = _folders()
    here = _working_folder()
    if here is not None and here not in folders:
        os.environ[FOLDERS] = os.pathsep.join([*folders, here])
    _add_folders()
    for name in added:
        _find(name)
    os.environ[MODULES] = ",".join([*_named(), *added])


def import_named_modules() -> None:
    """Imports the modules named in the environment, once.

    Raises:
        ExtensionError: for a module that does not exist.
    """
    global _imported
    named = os.environ.get(MODULES)
    if not named or named == _imported:
        return
    with _lock:
        if named == _imported:
            return
        before, _imported = _imported, named  # the modules themselves look up schemes
        try:
            _add_folders()
            for name in _named():
                _find(name)
                importlib.import_module(name)
        except BaseException:
            _imported = before
            raise


def _named() -> list[str]:
    return [name for name in os.environ.get(MODULES, "").split(",") if name]


def _folders() -> list[str]:
    return [folder for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]


def _working_folder() -> str | None:
    """Returns the working folder, or `None` if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _add_folders() -> None:
    sys.path += [folder for folder in _folders() if folder not in sys.path]


def _find(name: str) -> None:
    try:
        exists = name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        exists = False
    except (ImportError, ValueError):  # not a module name, for example a path
        exists = False
    if not exists:
        searched = " or in ".join(["on the import path", *_folders()])
        deleted = " The working folder no longer exists." if _working_folder() is None else ""
        raise ExtensionError(f"--import {name}: there is no module {name!r} {searched}.{deleted}")
