"""Links from pages to files of the repository outside docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documentation.built import page
from tests.documentation.conftest import ROOT, build

FILES = {
    "docs/conf.py": """
import sys
sys.path.insert(0, {extensions!r})
extensions = ["myst_parser", "repository_files"]
myst_heading_anchors = 3
repository_pages = ["CONTRIBUTING.md", "cards/*.md"]
repository_url = {url!r}
""",
    "docs/index.md": "# Home\n\n```{toctree}\nfolder/page\nrepository/CONTRIBUTING\nrepository/cards/README\n```\n",
    "docs/folder/page.md": "# Page\n\n[code](../../code/run.py), [set up](../../CONTRIBUTING.md#set-up), "
    "[try](../explorer/index.html), [card](../../cards/one.md).\n",
    "docs/explorer/index.html": "<p>moves</p>",
    "CONTRIBUTING.md": "# Contributing\n\n## Set up\n\n[page](docs/folder/page.md), [data](code/run.py).\n",
    "cards/README.md": "# Cards\n\n[one](one.md), [code](../code/run.py)\n",
    "cards/one.md": "# One\n",
    "code/run.py": "answer = 42\n",
}


def built(root: Path, url: str) -> Path:
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if path == "docs/conf.py":
            text = text.format(extensions=str(ROOT / "docs" / "_extensions"), url=url)
        (root / path).write_text(text)
    return build(root / "docs", root / "site")


def targets(path: Path) -> list[str]:
    return page(path).targets


def test_without_an_address_of_the_repository_the_site_shows_the_files(tmp_path: Path) -> None:
    site = built(tmp_path, "")
    found = targets(site / "folder" / "page.html")
    assert "../_files/code/run.py.html" in found
    assert "../repository/CONTRIBUTING.html#set-up" in found
    assert "../explorer/index.html" in found
    assert "../repository/cards/one.html" in found
    assert "answer = 42" in page(site / "_files" / "code" / "run.py.html").text
    assert (site / "explorer" / "index.html").read_text() == "<p>moves</p>"
    copied = targets(site / "repository" / "CONTRIBUTING.html")
    assert "../folder/page.html" in copied
    assert "../_files/code/run.py.html" in copied
    assert "../../_files/code/run.py.html" in targets(site / "repository" / "cards" / "README.html")


def test_with_an_address_links_lead_there(tmp_path: Path) -> None:
    site = built(tmp_path, "https://example.org/project")
    assert "https://example.org/project/blob/main/code/run.py" in targets(site / "folder" / "page.html")
    assert not (site / "_files").exists()


@pytest.mark.long
def test_links_to_files_that_are_not_there_fail_the_build(tmp_path: Path) -> None:
    built(tmp_path, "")
    links = ["../../code/gone.py", "../../GONE.md", "../folder/gone.md", "../explorer/gone.html"]
    text = "# Page\n\n" + "\n".join(f"[lost]({link})" for link in links)
    (tmp_path / "docs" / "folder" / "page.md").write_text(text)
    with pytest.raises(AssertionError) as failed:
        build(tmp_path / "docs", tmp_path / "site")
    assert all(f"'{link}'" in str(failed.value) for link in links)
