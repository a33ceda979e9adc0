"""Programs in separate processes that start with torch and transformers imported and without this package.

Importing the two takes seconds. A server imports them once and forks for each program. A test of what an import does,
or of what comes before it, starts an interpreter instead, and so does one of a script as a user runs it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).resolve().parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.fresh_imports"])


def run_python(
    *words: object, folder: Path = ROOT, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Runs `python WORDS` in a new interpreter, which finds this repository from any folder."""
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": search_path} | dict(environment or {})
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def printed(done: CompletedProcess[str]) -> str:
    """What a process has printed, which ended well."""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


def run_fresh(
    program: str,
    *arguments: object,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 1200.0,
) -> CompletedProcess[str]:
    """Runs a program as `python -c PROGRAM ARGUMENTS` does.

    Raises:
        TimeoutError: the program did not end.
    """
    (done,) = run_together(program, *arguments, environments=[environment or {}], folder=folder, timeout=timeout)
    return done


def run_together(
    program: str,
    *arguments: object,
    environments: Sequence[Mapping[str, str]],
    folder: Path | None = None,
    timeout: float = 1200.0,
) -> list[CompletedProcess[str]]:
    """Runs a program in several processes at once. When one fails, the others are killed.

    Args:
        environments: variables that are set in addition, for each process.
        timeout: seconds after which they are killed.

    Raises:
        TimeoutError: a process did not end.
    """
    words = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as place:
        streams = [(f"{place}/{number}.output", f"{place}/{number}.errors") for number in range(len(environments))]
        for path in (one for paths in streams for one in paths):
            # A process may be killed before it has opened its own.
            Path(path).touch()
        processes = [
            _CONTEXT.Process(
                target=_run, args=(program, words, str(folder or Path.cwd()), dict(os.environ | variables), *paths)
            )
            for variables, paths in zip(environments, streams, strict=True)
        ]
        for process in processes:
            process.start()
        end, failed = time.monotonic() + timeout, False
        running = {process.sentinel: process for process in processes}
        while running and not failed and time.monotonic() < end:
            for sentinel in wait(list(running), end - time.monotonic()):
                ended = running.pop(sentinel)
                ended.join()
                failed |= ended.exitcode != 0
        for process in running.values():
            process.kill()
            process.join()
        if running and not failed:
            said = Path(streams[0][1]).read_text()
            raise TimeoutError(f"The program did not end within {timeout:g} s. {said[-2000:]}")
        return [
            CompletedProcess(words, process.exitcode, *(Path(path).read_text() for path in paths))
            for process, paths in zip(processes, streams, strict=True)
        ]


def _run(program: str, words: list[str], folder: str, variables: dict[str, str], output: str, errors: str) -> None:
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = words
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(program, "<program>", "exec"), vars(main))
