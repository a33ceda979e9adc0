"""The site in a real browser: widths, dark pages, search, no errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import served

pytestmark = pytest.mark.long

PAGES = (
    "index",
    "reference/schemes/index",
    "reference/schemes/alibi",
    "reference/api/rope_scaling",
    "reference/architectures",
    "reference/command_line",
    "reference/study_settings",
    "results/findings",
    "results/price/table",
    "how_to/healing",
)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as found:
        yield found


@pytest.fixture(params=[("light", 1280), ("dark", 400)], ids=lambda one: f"{one[0]}-{one[1]}")
def tab(request: pytest.FixtureRequest, chromium: Any) -> Iterator[tuple[Any, str]]:
    """A page in a colour scheme and a width; it must not print an error."""
    scheme, width = request.param
    opened = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("response", lambda answer: problems.append(answer.url) if answer.status >= 400 else None)
    yield opened, scheme
    opened.close()
    assert problems == []


def test_pages_fit_their_width_in_both_colours(tab: tuple[Any, str], address: str) -> None:
    opened, scheme = tab
    for name in PAGES:
        opened.goto(f"{address}/{name}.html")
        assert opened.evaluate("document.documentElement.dataset.theme") == scheme
        assert opened.evaluate("document.documentElement.scrollWidth") <= opened.viewport_size["width"], name


def test_a_page_shows_the_figures_of_its_colour_with_their_captions(tab: tuple[Any, str], address: str) -> None:
    opened, scheme = tab
    opened.goto(f"{address}/reference/schemes/alibi.html")
    shown = [image.get_attribute("src") for image in opened.query_selector_all("figure img") if image.is_visible()]
    assert len(shown) >= 2
    assert all(source.endswith("_dark.svg") == (scheme == "dark") for source in shown)
    assert all(caption.is_visible() for caption in opened.query_selector_all("figcaption"))


def test_the_search_finds_an_option(tab: tuple[Any, str], address: str) -> None:
    opened, _ = tab
    opened.goto(f"{address}/search.html?q=beta_fast")
    opened.wait_for_selector("ul.search li a")
    found = [link.get_attribute("href") for link in opened.query_selector_all("ul.search li a")]
    assert any("reference/api/rope_scaling.html" in target for target in found)


def test_the_box_above_the_architectures_hides_other_rows(tab: tuple[Any, str], address: str) -> None:
    opened, _ = tab
    opened.goto(f"{address}/reference/architectures.html")
    assert "*" not in "".join(opened.locator("td").all_inner_texts())
    opened.fill("#row-filter", "sam3 rope_nd=yes")
    shown = [row.inner_text() for row in opened.locator("article tbody tr").all() if row.is_visible()]
    assert any("sam3_vit_model" in row for row in shown)
    assert not any("llama" in row for row in shown)
    assert opened.locator("output[for=row-filter]").inner_text().endswith("rows")
    opened.fill("#row-filter", "")
    assert not opened.locator("details tbody tr").first.is_visible()  # folded again


def test_the_head_of_a_column_sorts_its_table(chromium: Any, address: str) -> None:
    opened = chromium.new_page()
    opened.goto(f"{address}/study/leaderboard.html")
    table = opened.locator("article table").first
    for first in ("0.99", "1.34"):
        table.locator("th:nth-child(6) button").click()
        assert table.locator("tbody tr:first-child td:nth-child(6)").inner_text() == first
    # RoPE has no difference from itself: an empty cell stays last in both directions.
    for _ in range(2):
        table.locator("th:nth-child(3) button").click()
        assert table.locator("tbody tr").last.inner_text().startswith("rope")
    opened.close()


@pytest.mark.parametrize("name", ["study/leaderboard", "reference/architectures", "reference/runtimes"])
def test_wide_tables_are_not_cut_off(name: str, chromium: Any, address: str) -> None:
    opened = chromium.new_page(viewport={"width": 1280, "height": 900})
    opened.goto(f"{address}/{name}.html")
    opened.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    boxes = "[...document.querySelectorAll('article table')].map((one) => one.parentElement)"
    assert opened.evaluate(f"{boxes}.filter((one) => one.scrollWidth > one.clientWidth + 1).length") == 0
    opened.close()


def test_the_button_changes_the_colours(chromium: Any, address: str) -> None:
    opened = chromium.new_page(color_scheme="light")
    opened.goto(f"{address}/index.html")
    before = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.click("button.theme-switch-button:visible")
    opened.click("button.theme-change-button[data-mode=dark]:visible")
    assert opened.evaluate("document.documentElement.dataset.theme") == "dark"
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") != before
    opened.close()
