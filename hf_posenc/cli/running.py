"""Verbs that start another program: `hf-posenc run`, `compare`, and the programs in `PROGRAMS`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hf_posenc
from hf_posenc.errors import UsageError
from hf_posenc.installation import TRAINING, install_command, located, require, scripts_folder
from hf_posenc.version import REPOSITORY

#: Verbs that start third-party programs: the command, and how to install it.
PROGRAMS = {
    "serve": (["transformers", "serve"], "pip install 'transformers[serving]'"),
    "lm-eval": (["lm-eval"], install_command("eval")),
}


def start(verb: str, words: list[str], imports: list[str]) -> int:
    """Runs a program. It and every Python process that it starts import the plugin.

    A word that names a script or a settings file of this package, such as `training/run_clm.py`, becomes its path.

    Except for `compare`, the program replaces this process, so it receives signals and sets the exit status itself.
    The verb is "run", "compare" or one of `PROGRAMS`.

    Raises:
        UsageError: if the program does not exist.
    """
    words = [located(word) for word in words]
    if verb == "compare":
        return _compare(words, imports)
    if verb in PROGRAMS:
        command, installed_by = PROGRAMS[verb]
        try:
            words = [*resolved(command), *words]
        except UsageError as error:
            raise UsageError(f"{command[0]} is not installed. Run: {installed_by}") from error
    else:
        words = resolved(words)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(words[0], words, environment())
    except OSError as error:
        raise UsageError(f"run: {words[0]} cannot be run: {error.strerror}.") from error


def resolved(words: list[str]) -> list[str]:
    """Returns a command with the path of its program: a Python file and `-m` are run by this interpreter.

    A program without a folder is searched for next to this interpreter first, then on the path. So `python` and
    `lm-eval` are those of the environment of this package, even if it is not activated.

    Raises:
        UsageError: if it cannot be found, or cannot be executed.
    """
    name = words[0]
    if name.endswith(".py") and not Path(name).is_file():
        raise UsageError(f"run: the file {name} does not exist.")
    if name == "-m" or name.endswith(".py"):
        return [sys.executable, *words]
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None and os.sep in name:
        raise UsageError(f"run: {name} {'is not a program' if Path(name).exists() else 'does not exist'}.")
    if program is None:
        module = name.replace("-", "_")
        is_module = module.isidentifier() and importlib.util.find_spec(module) is not None
        hint = f" There is a module with that name: hf-posenc run -- -m {module} ..." if is_module else ""
        raise UsageError(f"run: the command {name!r} is neither next to {sys.executable} nor on the path.{hint}")
    return [program, *words[1:]]


def environment() -> dict[str, str]:
    """Returns an environment in which a process, and every process that it starts, imports the plugin at startup."""
    folder = str(Path(hf_posenc.__file__).resolve().parent / "with_plugin")
    path = os.environ.get("PYTHONPATH")
    if path and folder in path.split(os.pathsep):
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else folder}


def _compare(words: list[str], imports: list[str]) -> int:
    """Runs training/compare.py of this package."""
    require("hf-posenc compare", *TRAINING)
    script = scripts_folder() / "training" / "compare.py"
    if not script.is_file():
        raise UsageError(f"This copy of hf_posenc has no {script}. Install the package, or clone {REPOSITORY}.")
    process = subprocess.Popen([sys.executable, str(script), *words, *(f"--import={name}" for name in imports)])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # Ctrl-C also reaches the process, which saves its work before it ends.
