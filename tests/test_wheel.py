"""The wheel holds the scripts, and runs them without the repository."""

from __future__ import annotations

import os
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hf_posenc.installation import EXTRAS, TRAINING, located, scripts_folder
from hf_posenc.version import REPOSITORY, __version__
from tests.fresh import ROOT, printed, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Where the module of a package has another name.
PACKAGES = {"sklearn": "scikit-learn", "lm_eval": "lm-eval"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    pytest.importorskip("hatch_fancy_pypi_readme", reason="needs hatchling and its plugin: pip install '.[test]'")
    folder = tmp_path_factory.mktemp("wheel")
    printed(run_python("-m", "hatchling", "build", "-t", "wheel", "-d", folder))
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_the_package_and_the_scripts(wheel: Path) -> None:
    assert {path.name for path in wheel.iterdir()} == {"hf_posenc", f"hf_posenc-{__version__}.dist-info"}

    def files(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if "__pycache__" not in path.parts}

    assert files(ROOT / "hf_posenc") <= files(wheel / "hf_posenc")
    for name in ("training", "eval"):
        assert files(wheel / "hf_posenc" / "_scripts" / name) == files(ROOT / name)
    assert (wheel / "hf_posenc" / "_scripts" / "model_cards" / "template.md").is_file()


def test_links_of_the_description_lead_to_the_repository(wheel: Path) -> None:
    text = next(wheel.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    assert f"]({REPOSITORY}/blob/v{__version__}/docs/how_to/patching.md)" in text
    assert not [link for link in ("](docs/", '="docs/', "](examples/") if link in text]


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["compare", "training/studies/findings.yaml", "--schemes", "nonsense"],
        ["run", "training/run_clm.py", "--nonsense", "1"],
    ],
)
def test_scripts_run_from_the_wheel_beside_a_package_called_training(wheel: Path, tmp_path: Path, words: list[str]):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").write_text("raise AssertionError('the package of the user')")
    search_path = {"PYTHONPATH": f"{wheel}{os.pathsep}{tmp_path}"}
    done = run_python("-m", "hf_posenc", *words, folder=tmp_path, environment=search_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "nonsense" in done.stderr


def test_scripts_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert scripts_folder() == ROOT
    assert located("training/run_clm.py") == str(ROOT / "training" / "run_clm.py")
    assert located("training/none.py") == "training/none.py"
    assert located("hf_posenc/entry.py") == "hf_posenc/entry.py"
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "dog.py").touch()
    assert located("eval/dog.py") == "eval/dog.py"


def test_extras_install_what_messages_say() -> None:
    extras = PROJECT["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        requirements = [Requirement(line) for line in extras[extra]]
        inside = [packages(name) for one in requirements if one.name == "hf-posenc" for name in one.extras]
        return {one.name for one in requirements}.union(*inside)

    for extra, modules in EXTRAS.items():
        assert {PACKAGES.get(name, name) for name in modules} <= packages(extra), extra
    assert set(TRAINING) <= set(EXTRAS["train"])
    assert len(PROJECT["dependencies"]) == 3  # alone, it stays light


def test_the_address_is_one() -> None:
    urls = PROJECT["urls"]
    assert urls["Repository"] == urls["Homepage"] == REPOSITORY
    assert all(urls[name].startswith(REPOSITORY) for name in ("Issues", "Changelog"))
    assert f"{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')}/" in (ROOT / "pyproject.toml").read_text()
