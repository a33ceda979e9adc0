"""Programs in a process of their own that start with torch and transformers imported and without this package.

Importing the two takes seconds. A server imports them once and forks for each program. A test of what an import does,
or of what comes before it, starts an interpreter instead.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.fresh_imports"])


def run_fresh(
    program: str,
    *arguments: object,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 1200.0,
) -> CompletedProcess[str]:
    """Runs a program as `python -c PROGRAM ARGUMENTS` does.

    Args:
        program: source code.
        *arguments: follow in `sys.argv`.
        folder: where it runs; the current folder by default.
        environment: variables that are set in addition.
        timeout: seconds after which it is killed.

    Raises:
        TimeoutError: the program did not end.
    """
    arguments = tuple(map(str, arguments))
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place, "output"), Path(place, "errors")
        variables = dict(os.environ | (environment or {}))
        process = _CONTEXT.Process(
            target=_run, args=(program, arguments, str(folder or Path.cwd()), variables, str(output), str(errors))
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"The program did not end within {timeout:g} s. {errors.read_text()[-2000:]}")
        assert process.exitcode is not None
        return CompletedProcess(arguments, process.exitcode, output.read_text(), errors.read_text())


def _run(
    program: str, arguments: tuple[str, ...], folder: str, environment: dict[str, str], output: str, errors: str
) -> None:
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(program, "<program>", "exec"), vars(main))
