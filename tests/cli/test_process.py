"""`hf-posenc compare`, and exit status, errors and usage of all commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posenc import installation
from hf_posenc.cli import catalogue, main, running
from hf_posenc.version import __version__
from tests.fresh import run_fresh, run_python

from .running import refused


class TestCompare:
    def test_the_script_gets_its_arguments_untouched(self, tmp_path, monkeypatch):
        (tmp_path / "training").mkdir()
        (tmp_path / "training" / "compare.py").write_text(
            "import json, sys\nopen('seen.json', 'w').write(json.dumps(sys.argv[1:]))\nsys.exit(7)\n"
        )
        monkeypatch.setattr(running, "scripts_folder", lambda: tmp_path)
        monkeypatch.chdir(tmp_path)
        assert main(["compare", "--schemes", "none", "--", "--help"]) == 7
        assert json.loads((tmp_path / "seen.json").read_text()) == ["--schemes", "none", "--", "--help"]

    def test_missing_scripts_and_packages_are_named(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setattr(running, "scripts_folder", lambda: tmp_path)
        assert "Install the package, or clone https://" in refused(capsys, "compare")
        monkeypatch.setattr(installation, "missing", lambda modules: [name for name in modules if name == "scipy"])
        assert refused(capsys, "compare").endswith(
            "not installed: scipy. Run: pip install 'hf-posenc[train] @ git+https://github.com/hf-posenc/hf_posenc'"
        )


class TestProcess:
    def test_errors_and_status_in_a_process_of_its_own(self, tmp_path):
        program = "import runpy; runpy.run_module('hf_posenc', run_name='__main__')"
        done = run_fresh(program, "patch", "nowhere", "alibbi", "--output", tmp_path / "x", folder=tmp_path)
        assert done.returncode == 2
        assert "Did you mean 'alibi'" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), BrokenPipeError("of something else")])
    def test_an_unexpected_exception_keeps_its_traceback(self, monkeypatch, error):
        def broken(options):
            raise error

        monkeypatch.setattr(catalogue, "schemes", broken)
        with pytest.raises(type(error), match=str(error)):
            main(["schemes"])

    @pytest.mark.parametrize(
        ("words", "printed"),
        [
            *(([*words], ["usage: hf-posenc"]) for words in (["eval"], ["nonsense"], ["patch", "model", "rope"])),
            ([], ["usage: hf-posenc", "measure what a position encoding does"]),
            # A word too many shows the usage of the verb.
            (["plot", "ssmax", "pope"], ["usage: hf-posenc plot ", "unrecognized arguments: pope"]),
            (["run"], ["hf-posenc run -- COMMAND"]),
            (["patch", "MODEL", "alibi", "--output", "x", "--layrs", "0"],
             ["arguments: --layrs 0. Did you mean '--layers'", "hf-posenc patch --help lists the options."]),
            (["schemes", "--jsno"], ["usage: hf-posenc schemes ", "arguments: --jsno. Did you mean '--json'?"]),
            (["eval", "properties", "--scheme", "rope", "--nonsense"],
             ["usage: hf-posenc eval properties ", "unrecognized arguments: --nonsense"]),
        ],
    )  # fmt: skip
    def test_wrong_commands_show_the_usage(self, capsys, words, printed):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert all(text in said for text in printed)

    def test_a_reader_that_goes_away_ends_it_quietly(self):
        program = (
            "import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
            "from hf_posenc.cli import main; sys.exit(main(['schemes']))"
        )
        done = run_fresh(program)
        assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.long
def test_a_script_of_eval_runs_from_a_clone(tmp_path):
    script = Path(__file__).resolve().parents[2] / "eval" / "loss.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--lengths" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "output"),
    [
        (["--help"], 0, "VERB"),
        (["--version"], 0, f"hf_posenc {__version__}, torch 2."),
        (["inspect"], 2, "usage: hf-posenc inspect"),
    ],
)
def test_what_needs_no_model_loads_no_framework(words, status, output):
    code = (
        f"import sys; from hf_posenc.cli import main\ntry: status = main({words})\n"
        "except SystemExit as error: status = error.code\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules), status, file=sys.stderr)"
    )
    done = run_python("-c", code)
    assert done.stderr.splitlines()[-1] == f"set() {status}"
    assert output in done.stdout + done.stderr


@pytest.mark.parametrize(
    "verb", [[], *([name] for name in ("schemes", "inspect", "patch", "export", "eval", "report", "plot"))]
)
def test_help_fits_on_a_screen(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([*verb, "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 40
