"""`hf-posenc run`: third-party programs with the plugin imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posenc.cli.running import environment, resolved

from .running import refused

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, multiprocessing, os, subprocess, sys

def report():
    loaded = {name: name in sys.modules for name in ("hf_posenc", "torch", "transformers", "far_schemes", "other_one")}
    return {"process": os.getpid(), "modules": loaded, "arguments": sys.argv[1:]}

if __name__ == "__main__":
    reports = [report()]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        reports.append(pool.apply(report))
    here = "import program, json; print(json.dumps(program.report()))"
    child = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, check=True)
    reports.append(json.loads(child.stdout))
    from hf_posenc import get_scheme
    reports.append(get_scheme("far_for_tests").__module__)
    print(json.dumps([*reports, sys.stdin.read()]))
    sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from .test_schemes import THIRD_PARTY

    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "far_schemes.py").write_text(THIRD_PARTY)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "sitecustomize.py").write_text("import sys\nsys.modules['other_one'] = sys\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path / 'others'}")
    return tmp_path


def test_the_plugin_is_in_the_program_and_in_all_processes_it_starts(folder):
    command = [sys.executable, "-m", "hf_posenc", "--import", "far_schemes", "run", "--", "program.py", "--import"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate("a line")
        assert process.returncode == 7
    first, spawned, child, module, typed = json.loads(output)
    lazy = {"hf_posenc": True, "torch": False, "transformers": False, "far_schemes": False, "other_one": True}
    assert [report["modules"] for report in (first, spawned, child)] == [lazy] * 3
    assert module == "far_schemes"
    assert typed == "a line"
    # Signals reach the program itself, because it has the process of the command.
    assert first["process"] == process.pid
    assert first["arguments"] == ["--import"]


def test_the_environment_of_the_caller_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"a{os.pathsep}")
    changed = environment()
    assert changed["PYTHONPATH"].split(os.pathsep)[1:] == ["a", ""]
    assert os.environ["PYTHONPATH"] == f"a{os.pathsep}"
    monkeypatch.setenv("PYTHONPATH", changed["PYTHONPATH"])
    assert environment() == changed
    monkeypatch.delenv("PYTHONPATH")
    assert os.pathsep not in environment()["PYTHONPATH"]


def test_what_a_command_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("")
    assert resolved(["script.py", "-x"]) == [sys.executable, "script.py", "-x"]
    assert resolved(["-m", "json.tool", "x"]) == [sys.executable, "-m", "json.tool", "x"]
    # The environment of this package comes before the path.
    monkeypatch.setenv("PATH", "/nowhere")
    assert resolved(["python", "-c", "1"]) == [str(Path(sys.executable).parent / "python"), "-c", "1"]
    assert resolved(["/bin/sh"]) == ["/bin/sh"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--", "nowhere-to-be-found"], "'nowhere-to-be-found' is neither next to"),
        (["run", "--", "nothing.py"], "the file nothing.py does not exist"),
        (["run", "./nothing"], "./nothing does not exist"),
        (["run", "--", "/"], "/ is not a program"),
        (["run", "--", "hf-posenc.patching"], "neither next to"),
        (["run", "--", "safetensors"], "hf-posenc run -- -m safetensors"),
        (["run", "./broken"], "cannot be run: Exec format error"),
        (["run", "--import", "nowhere_to_be_found", "--", "python"], "no module 'nowhere_to_be_found'"),
    ],
)
def test_what_cannot_be_run_is_refused(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    Path("broken").write_text("neither a script nor a program")
    Path("broken").chmod(0o755)
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    ("verb", "remedy"), [("serve", "transformers[serving]"), ("lm-eval", "hf-posenc[eval]")], ids=["serve", "lm-eval"]
)
def test_a_program_that_is_not_installed(capsys, tmp_path, monkeypatch, verb, remedy):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert remedy in refused(capsys, verb, "--model", "x")
