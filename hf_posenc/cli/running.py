"""The verb `hf-posenc run`: any program with the plugin imported, in it and in every Python process it starts."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import hf_posenc
from hf_posenc.errors import UsageError

#: Verbs that are programs of others: the command, and how it is installed.
PROGRAMS = {
    "serve": (["transformers", "serve"], "pip install 'transformers[serving]'"),
    "lm-eval": (["lm-eval"], "pip install 'lm-eval>=0.4.13'"),
}


def add_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `run`, and the verbs that stand for a program, to those of `hf-posenc`."""
    parser = verbs.add_parser(
        "run", help="run a program with the plugin: run -- lm-eval ..., run -- accelerate launch script.py",
        usage="hf-posenc [--import MODULE] run -- COMMAND ...",
        description="COMMAND is a program, a .py file or -m MODULE. The plugin is imported in it and in every Python "
        "process that it starts, except those started with python -I, -E or -S.",
    )  # fmt: skip
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="the program and its arguments")
    parser.set_defaults(run="running.run", parser=parser)
    for verb, (command, _) in PROGRAMS.items():
        parser = verbs.add_parser(verb, help=f"the same as run -- {' '.join(command)}", add_help=False)
        parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
        parser.set_defaults(run="running.run_program", parser=parser, verb=verb)


def run(options: argparse.Namespace) -> int:
    """`hf-posenc run`: becomes the program, so that its signals, streams and exit status are its own.

    Raises:
        UsageError: if there is no such program.
    """
    if not options.command:
        options.parser.error("say what to run: hf-posenc run -- COMMAND ...")
    return _become(resolved(options.command))


def run_program(options: argparse.Namespace) -> int:
    """`hf-posenc serve`, `hf-posenc lm-eval`.

    Raises:
        UsageError: if the program is not installed.
    """
    command, installed_by = PROGRAMS[options.verb]
    try:
        words = resolved(command)
    except UsageError as error:
        raise UsageError(f"{command[0]} is not installed. Run: {installed_by}") from error
    return _become([*words, *options.command])


def resolved(words: list[str]) -> list[str]:
    """A command with the path of its program: a Python file and `-m` are run by this interpreter.

    A program without a folder is looked for beside this interpreter first, then on the path: `python` and `lm-eval` are
    those of the environment that this package is installed in, whether it is activated or not.

    Raises:
        UsageError: if it cannot be found, or is no program.
    """
    name = words[0]
    if name == "-m":
        return [sys.executable, *words]
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UsageError(f"run: there is no file {name}.")
        return [sys.executable, *words]
    if os.sep in name:
        program = shutil.which(name)
        if program is None:
            raise UsageError(f"run: {name} {'is no program' if Path(name).exists() else 'does not exist'}.")
        return [program, *words[1:]]
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        module = name.replace("-", "_")
        hint = ""
        if module.isidentifier() and importlib.util.find_spec(module) is not None:
            hint = f" There is a module of that name: hf-posenc run -- -m {module} ..."
        raise UsageError(f"run: the command {name!r} is neither beside {sys.executable} nor on the path.{hint}")
    return [program, *words[1:]]


def environment() -> dict[str, str]:
    """The environment of a process that imports the plugin as it starts, and so of all that it starts."""
    folder = str(Path(hf_posenc.__file__).resolve().parent / "with_plugin")
    found = os.environ.get("PYTHONPATH")
    if found and folder in found.split(os.pathsep):
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{found}" if found else folder}


def _become(words: list[str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(words[0], words, environment())
    except OSError as error:
        raise UsageError(f"run: {words[0]} cannot be run: {error.strerror}.") from error
