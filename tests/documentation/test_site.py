"""The site builds without a warning, and its links lead somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documentation.built import page
from tests.documentation.conftest import ROOT

pytestmark = pytest.mark.long


def pages(site: Path) -> list[Path]:
    # The explorer has tests of its own, and the theme has a template that ends in .html.
    return [path for path in site.rglob("*.html") if path.relative_to(site).parts[0] not in ("explorer", "_static")]


def test_all_links_anchors_and_images_of_the_site_are_there(site: Path) -> None:
    lost = []
    found = set(pages(site))
    assert len(found) > 100
    for path in found:
        for target, file, anchor in page(path).local_targets():
            html = file.suffix == ".html"
            if not file.is_file() or (anchor and html and file in found and anchor not in page(file).anchors):
                lost.append(f"{path.relative_to(site)}: {target}")
    assert lost == []


def test_every_page_of_docs_is_in_the_navigation_and_in_the_search(site: Path) -> None:
    docs = ROOT / "docs"
    written = [path.relative_to(docs) for ending in ("md", "ipynb") for path in docs.rglob(f"*.{ending}")]
    names = {path.with_suffix("").as_posix() for path in written if path.parts[0] != "explorer"}
    reached, open_pages = set(), {site / "index.html"}
    while open_pages:
        path = open_pages.pop()
        reached.add(path)
        linked = {file for _, file, _ in page(path).local_targets() if file.suffix == ".html" and file.is_file()}
        open_pages |= linked & set(pages(site)) - reached
    assert {name for name in names if site / f"{name}.html" not in reached} == set()
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert {name for name in names if f'"{name}"' not in index} == set()
