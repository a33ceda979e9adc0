"""One build of the site for all tests of this folder."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.fresh import printed, run_fresh

pytest.importorskip("sphinx")

ROOT = Path(__file__).resolve().parents[2]
#: The schemes with figures. To draw all of them takes more than a minute.
DRAWN = ("alibi",)
#: As in .gitignore.
GENERATED = ("reference/schemes", "reference/command_line.md", "reference/study_settings.md", "repository")


def site_extension(name: str) -> ModuleType:
    """A module of docs/_extensions."""
    sys.path.insert(0, str(ROOT / "docs" / "_extensions"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _generated(folder: str, names: list[str]) -> list[str]:
    """What the build writes into docs/."""
    here = Path(folder).relative_to(ROOT / "docs")
    return [name for name in names if (here / name).as_posix() in GENERATED]


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with a copy of docs/ that has no generated pages, as in a new clone."""
    root = tmp_path_factory.mktemp("repository")
    for path in ROOT.iterdir():
        if path.name not in ("docs", "outputs", ".git"):
            (root / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", root / "docs", ignore=_generated)
    return root


@pytest.fixture(scope="session")
def site(repository: Path) -> Path:
    """The folder of the built site."""
    return build(repository / "docs", repository / "site", "-D", f"scheme_figures={','.join(DRAWN)}")


def build(docs: Path, site: Path, *options: str) -> Path:
    """Builds a site as the command does, with every warning as an error."""
    program = "import sys; from sphinx.cmd.build import build_main; sys.exit(build_main(sys.argv[1:]))"
    printed(run_fresh(program, "-W", "--keep-going", "-q", *options, docs, site))
    return site
