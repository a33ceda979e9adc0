"""Two schemes side by side, links, and the text where nothing can be drawn: in Chromium, one page for many tests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from tests.browser import served
from tests.explorer.conftest import DOCS
from tests.explorer.library import data
from tests.explorer.test_page import CLIPPED, CONTRAST, NAMELESS, NO_OVERFLOW, SCHEMES, content, go, settle

pytestmark = pytest.mark.long

#: The texts of an axis of every chart of a panel, by column.
TICKS = """([panel, axis]) => [...document.querySelectorAll(`${panel} .column`)].map((column) =>
  [...column.querySelectorAll("svg text.tick")]
    .filter((one) => (one.getAttribute("text-anchor") === "end") === (axis === "y"))
    .map((one) => one.textContent))"""
KEYS = "(panel) => [...document.querySelectorAll(`${panel} .column .key`)].map((key) => key.textContent)"


def test_two_schemes_stand_beside_each_other_with_the_same_axes(open_page: Any) -> None:
    page = open_page("#schedule,none")
    assert "rope" in page.inner_text("#steps .layers")
    go(page, "#alibi,kerple")
    assert page.input_value("#second") == "kerple"
    for panel in ("#steps", "#decay", "#attention", "#map"):
        assert page.eval_on_selector_all(f"{panel} h3", "all => all.map((one) => one.textContent)") == [
            "alibi",
            "kerple",
        ]
    boxes = [one.bounding_box() for one in page.query_selector_all("#decay .column")]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    # Also a scheme of the library beside a formula.
    for address, axes, panels in (
        ("#rope,learned_rope", "x", ()),
        ("#alibi,shaw", "", ("#attention", "#map")),
        ("#alibi,kerple", "xy", ("#attention", "#map")),
    ):
        go(page, address)
        for axis in axes:
            one, other = page.evaluate(TICKS, ["#decay", axis])
            assert one == other, (address, axis)
        for panel in panels:
            one, other = page.evaluate(KEYS, panel)
            assert one == other, (address, panel)
    page.uncheck("#same")
    settle(page)
    one, other = page.evaluate(KEYS, "#map")
    assert one != other
    assert "axes=own" in page.evaluate("location.hash")
    # The names of the two are in both lists of bars, in their colours.
    assert page.locator("#dog .chosen").count() == page.locator("#dog-chosen .chosen").count() == 2
    assert page.inner_text("#code").splitlines() == [
        f'hf_posenc.patch_model(model, "{name}")' for name in ("alibi", "kerple")
    ]


def test_the_second_scheme_is_chosen_changed_and_left_and_its_address_restores_it(open_page: Any) -> None:
    page = open_page("#rope")
    page.select_option("#second", "rope")
    page.select_option("#option-2-scaling", "linear")
    settle(page)
    written = page.evaluate("location.hash")
    assert written == "#rope,rope&2.scaling=linear"
    assert page.inner_text("#decay h3 >> nth=1") == "rope (2)"
    assert page.input_value("#option-scaling") == "none"
    panels = ("#steps", "#decay", "#attention", "#map", "#dog-chosen")
    before = [content(page, panel) for panel in panels]
    again = open_page(written)
    assert again.is_hidden("#problems")
    assert [content(again, panel) for panel in panels] == before
    bars = page.eval_on_selector_all("#dog-chosen .bar", "all => all.map((one) => one.dataset.distance)")
    assert len(set(bars)) == len(bars) == 3
    # A bar changes the first scheme and keeps the second one.
    page.click("#dog [data-scheme=shaw] a")
    page.wait_for_function("document.querySelector('#scheme').value === 'shaw'")
    assert page.input_value("#second") == "rope"
    page.select_option("#second", "")
    settle(page)
    assert page.locator(".column").count() == 0
    assert page.evaluate("location.hash") == "#shaw"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_comparisons_fit_a_phone_and_can_be_read(open_page: Any, theme: str) -> None:
    page = open_page("#alibi,shaw", width=390, height=844, color_scheme=theme)
    for address in (
        "#alibi,shaw",
        "#normalized_integer,low_rank_relative&causal=1",
        "#schedule,swin",
        "#rope,hierarchical",
    ):
        go(page, address)
        assert page.evaluate(NO_OVERFLOW), address
        assert page.evaluate(CLIPPED) == [], address
        assert page.evaluate(NAMELESS) == [], address
    # Below each other, with all options in the flow of the page.
    boxes = [one.bounding_box() for one in page.query_selector_all("#decay .column")]
    assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]
    assert page.evaluate("getComputedStyle(document.querySelector('.side')).overflowY") == "visible"
    assert page.evaluate(CONTRAST) == []


def test_a_scheme_for_causal_models_hides_later_words_from_both(open_page: Any) -> None:
    """The two are compared on the same words."""
    page = open_page("#alibi,xpos")
    both = [content(page, panel) for panel in ("#decay", "#map", "#attention", "#dog-chosen")]
    assert "xpos is for causal models" in page.inner_text("#attention-note")
    assert not page.is_checked("#causal")
    page.check("#causal")
    assert [content(page, panel) for panel in ("#decay", "#map", "#attention", "#dog-chosen")] == both
    assert page.inner_text("#attention-note") == ""
    go(page, "#alibi,shaw")
    assert page.inner_text("#attention-note") == ""


def test_options_are_in_no_box_that_scrolls_and_stay_in_sight(open_page: Any) -> None:
    page = open_page("#rope&scaling=yarn", height=700)
    side = page.locator(".side")
    assert side.evaluate("(box) => box.scrollHeight <= box.clientHeight + 1")
    assert side.bounding_box()["height"] > 700
    page.evaluate("window.scrollTo({ top: document.body.scrollHeight / 2, behavior: 'instant' })")
    page.wait_for_function("document.querySelector('.side').getBoundingClientRect().bottom <= window.innerHeight")
    assert page.locator("#copy").bounding_box()["y"] < 700


def test_examples_of_the_library_change_the_pictures_and_say_that_they_are_examples(open_page: Any) -> None:
    page = open_page("#shaw")
    assert "depends on the words" in page.inner_text("#recorded")
    assert "random" in page.inner_text("#recorded")
    before = [content(page, panel) for panel in ("#decay", "#map", "#attention", "#dog-chosen")]
    example = list(data("recorded")["schemes"]["shaw"])[1]
    page.select_option("#option-example", example)
    after = [content(page, panel) for panel in ("#decay", "#map", "#attention", "#dog-chosen")]
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert example in page.inner_text("#code")
    assert page.input_value("#option-example") == example
    # Every option of the registry is listed with its meaning.
    names = {one["name"] for one in data("options")["schemes"]["shaw"]["options"]}
    assert set(page.eval_on_selector_all("#registry-list code", "all => all.map((one) => one.textContent)")) == names
    page.fill("#text", "one two one two")
    settle(page)
    assert "The library computed it" in page.inner_text("#attention")
    page.click("#attention button")
    settle(page)
    assert page.input_value("#text") == "The dog chased another dog"
    assert page.locator("#attention .cell").count() == 25
    go(page, "#string")
    assert "depends on the words" not in page.inner_text("#recorded")


def test_an_unknown_name_is_answered_with_links_to_the_nearest_ones(open_page: Any) -> None:
    page = open_page("#cop")
    assert "no scheme “cop”" in page.inner_text("#problems")
    assert page.input_value("#scheme") == "rope"
    names = page.eval_on_selector_all("#problems a", "all => all.map((one) => one.textContent)")
    assert names[0] == "cope"
    page.click("#problems a >> nth=0")
    page.wait_for_function("document.querySelector('#scheme').value === 'cope'")
    assert page.is_hidden("#problems")
    page = open_page("#alibi,ropee,t5")
    assert page.input_value("#scheme") == "alibi"
    assert page.input_value("#second") == ""
    assert "“ropee” to compare with" in page.inner_text("#problems")
    assert "rope" in page.eval_on_selector_all("#problems a", "all => all.map((one) => one.textContent)")


def test_links_lead_to_the_documentation_and_to_the_page_of_every_scheme(open_page: Any, tmp_path: Path) -> None:
    """In a folder like the site's, whose pages link back (docs/_extensions/scheme_pages.py)."""
    shutil.copytree(DOCS / "explorer", tmp_path / "explorer")
    pages = [
        tmp_path / "index.html",
        *(tmp_path / "reference" / "schemes" / f"{name}.html" for name in ["index", *SCHEMES]),
    ]
    for path in pages:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("<p>page</p>")
    with served(tmp_path) as root:
        here = f"{root}/explorer/index.html"
        page = open_page("#alibi,rope", root=here)
        links = [page.get_attribute(name, "href") for name in ("#docs-link", "#schemes-link", "#more", "#more-2")]
        assert [urljoin(here, link) for link in links] == [
            f"{root}/index.html",
            *(f"{root}/reference/schemes/{name}.html" for name in ("index", "alibi", "rope")),
        ]
        assert page.is_hidden("#alone")
        found = set()
        for name in SCHEMES[::8]:
            page.select_option("#scheme", name)
            settle(page)
            found.add(urljoin(here, page.get_attribute("#more", "href")))
        statuses = page.evaluate(
            "(all) => Promise.all(all.map(async (one) => (await fetch(one)).status))", sorted(found)
        )
        assert statuses == [200] * len(SCHEMES[::8])


def test_opened_as_a_file_it_says_how_to_serve_it(chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 390, "height": 800})
    page.goto((DOCS / "explorer" / "index.html").as_uri())
    text = page.inner_text("#from-file")
    command = "python -m http.server -d docs/explorer"
    assert command in text
    assert command in (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert page.is_hidden("main")
    assert page.evaluate(NO_OVERFLOW)
    page.close()
