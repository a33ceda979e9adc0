"""The explorer as a reader uses it, in Chromium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser import served
from tests.explorer.conftest import DOCS
from tests.explorer.library import data
from tests.thinning import mostly_slow

pytestmark = pytest.mark.long

ENTRIES = data("options")["schemes"]
SCHEMES = list(ENTRIES)
#: What a change can move: the pictures that depend on a scheme's options.
ANIMATED = ["none", "integer", "binary", "sinusoidal", "learned", "alibi", "rope", "self_extend"]
PANELS = ("#dog", "#steps", "#decay", "#attention", "#map")
#: A drawing as text; canvases as a sum of their pixels.
CONTENT = """(id) => {
  const box = document.querySelector(id);
  const sums = [...box.querySelectorAll("canvas")].map((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.reduce((sum, value, i) => (sum + value * (1 + (i % 9973))) % 1000003, 0);
  });
  return box.innerHTML + sums.join();
}"""
CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
NAMELESS = """() => [...document.querySelectorAll("button, select, input, a, [tabindex='0']")].filter((one) => {
  const labels = [...(one.labels ?? [])].map((label) => label.textContent.trim());
  const own = one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.textContent.trim();
  return !own && !labels.some(Boolean);
}).map((one) => one.outerHTML)"""
#: Texts that are cut off, by the edge of their drawing or of their box.
CLIPPED = """() => {
  const outside = [...document.querySelectorAll("main svg text")].filter((text) => {
    const [own, all] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
    return own.width > 0 && (own.left < all.left - 1 || own.right > all.right + 1);
  });
  const boxes = [...document.querySelectorAll(".bars a, .bars .why, h2, h3, .legend li, summary")];
  const cut = boxes.filter((one) => one.scrollWidth > one.clientWidth + 1 && !one.matches(".visually-hidden"));
  return [...outside, ...cut].map((one) => one.textContent);
}"""
NO_OVERFLOW = "document.documentElement.scrollWidth <= window.innerWidth"


def content(page: Any, panel: str) -> str:
    settle(page)
    return str(page.evaluate(CONTENT, panel))


def options_of(page: Any) -> list[str]:
    every = "all => all.map((one) => one.value + one.checked)"
    return list(page.eval_on_selector_all("#options select, #options input", every))


def settle(page: Any) -> None:
    """Waits for two frames: a change is drawn in the next one."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def go(page: Any, address: str) -> None:
    """Changes the address of an open page and waits until it is drawn."""
    page.evaluate("(address) => { location.hash = address; }", address)
    scheme = re.split("[&,]", address[1:])[0]
    page.wait_for_function("(name) => document.querySelector('#scheme').value === name", arg=scheme)
    settle(page)


def test_the_page_loads_and_links_to_the_documentation_only_where_it_is(open_page: Any) -> None:
    page = open_page()
    assert page.input_value("#scheme") == "rope"
    assert page.inner_text("h1")
    assert page.is_visible("#docs-link")
    assert page.is_hidden("#from-file")
    for panel in (*PANELS, "#minilm"):
        assert page.locator(f"{panel} >> visible=true").count() > 0, panel


def test_it_works_at_the_root_of_a_server_as_in_a_space(open_page: Any) -> None:
    with served(DOCS / "explorer") as root:
        page = open_page("#alibi", root=f"{root}/")
        assert page.input_value("#scheme") == "alibi"
        assert page.locator("#dog .bar[data-distance]").count() > 10
        assert page.is_hidden("#docs-link")
        assert page.is_hidden("#more")


def test_every_scheme_can_be_chosen_without_overflow_and_every_control_has_a_name(open_page: Any) -> None:
    page = open_page(height=2400)
    assert page.eval_on_selector_all("#scheme option", "all => all.map((one) => one.value)") == SCHEMES
    # What fits 320 pixels is likely to fit 390, which a part of the schemes is tried with.
    for width, names in ((1280, SCHEMES), (320, SCHEMES), (390, SCHEMES[::6])):
        page.set_viewport_size({"width": width, "height": 2400})
        seen = set()
        for name in names:
            page.select_option("#scheme", name)
            settle(page)
            assert page.evaluate("location.hash").split("&")[0] == f"#{name}"
            assert page.inner_text("#failure").startswith("Fails") or not ENTRIES[name].get("formulas"), name
            assert page.is_visible("#recorded") != bool(ENTRIES[name].get("formulas")), name
            assert page.evaluate(NO_OVERFLOW), (name, width)
            assert page.evaluate(CLIPPED) == [], (name, width)
            assert page.evaluate(NAMELESS) == [], name
            assert page.locator("svg[role=img]:not([aria-label])").count() == 0, name
            seen.add(content(page, "#steps") + content(page, "#decay") + content(page, "#map"))
        # Only `interleaved` and `local_global` have the same layers by default, where every fourth has full attention.
        assert len(seen) == len(names) - ({"interleaved", "local_global"} <= set(names))


@pytest.mark.parametrize(
    ("name", "option", "panels"),
    [
        ("rope", "theta", PANELS),
        ("alibi", "heads", ("#dog", "#steps", "#decay", "#map")),
        ("alibi", "n", ("#decay", "#map")),
        ("sinusoidal", "base", PANELS),
        ("t5", "max_distance", ("#decay", "#map")),
        ("integer", "scale", PANELS),
        ("binary", "bits", PANELS),
    ],
)
def test_a_slider_changes_what_depends_on_it(open_page: Any, name: str, option: str, panels: tuple[str, ...]) -> None:
    page = open_page(f"#{name}")
    before = {panel: content(page, panel) for panel in panels}
    of_place = option in ("heads", "n")
    slider = page.locator(f"#{option}" if of_place else f"#option-{option}")
    slider.focus()
    slider.press("Home")
    after = {panel: content(page, panel) for panel in panels}
    assert [panel for panel in panels if before[panel] == after[panel]] == []
    assert f"{option}=" in page.evaluate("location.hash")
    if not of_place:
        assert f"{option}=" in page.inner_text("#code")


# By default one with vectors, one with slopes and one that turns.
@pytest.mark.parametrize("name", mostly_slow(ANIMATED, lambda name: name in ("sinusoidal", "alibi", "rope")))
def test_the_animation_moves_by_keyboard_and_stops(open_page: Any, name: str) -> None:
    page = open_page(f"#{name}")
    figure = page.locator("#figure")
    figure.focus()
    start = int(page.input_value("#position"))
    shown = [content(page, "#steps")]
    for key, expected in (("ArrowRight", start + 1), ("ArrowRight", start + 2), ("ArrowLeft", start + 1)):
        figure.press(key)
        assert int(page.input_value("#position")) == expected
        shown.append(content(page, "#steps"))
    assert shown[0] != shown[1] != shown[2]
    assert shown[1] == shown[3]
    figure.press(" ")
    assert page.inner_text("#play") == "Pause"
    page.wait_for_function("(start) => Number(document.querySelector('#position').value) > start + 1", arg=start)
    figure.press(" ")
    assert page.inner_text("#play") == "Play"
    stopped = page.input_value("#position")
    page.wait_for_timeout(300)
    assert page.input_value("#position") == stopped


def test_the_angle_between_query_and_key_stays_while_both_turn(open_page: Any) -> None:
    page = open_page("#rope")
    angles, arrows = set(), set()
    for _ in range(4):
        angles.add(re.search(r"is ([\d.]+)°", page.inner_text("#steps-text")).group(1))
        arrows.add(page.get_attribute("#steps line.query-arrow", "x2"))
        page.click("#forward")
    assert len(angles) == 1
    assert len(arrows) == 4


def test_reduced_motion_plays_in_whole_steps_only(open_page: Any) -> None:
    def drawn_while_playing(page: Any) -> int:
        page.evaluate(
            """() => { window.drawn = new Set();
              const steps = document.querySelector("#steps");
              const add = () => window.drawn.add(steps.querySelector("line.query-arrow").getAttribute("x2"));
              new MutationObserver(add).observe(steps, { childList: true }); }"""
        )
        start = int(page.input_value("#position"))
        page.click("#play")
        page.wait_for_function("(start) => Number(document.querySelector('#position').value) > start + 2", arg=start)
        page.click("#play")
        return int(page.evaluate("window.drawn.size"))

    assert drawn_while_playing(open_page(reduced_motion="reduce")) <= 5
    assert drawn_while_playing(open_page(reduced_motion="no-preference")) > 5


def test_everything_can_be_reached_and_used_with_the_keyboard_alone(open_page: Any) -> None:
    page = open_page()
    reached = []
    for _ in range(70):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    wanted = "theme scheme option-theta n heads causal copy text figure back play forward position pair distance head"
    assert {*wanted.split(), "alibi"} <= set(reached)
    page.focus("#option-theta")
    page.keyboard.press("ArrowRight")
    settle(page)
    assert "theta=" in page.evaluate("location.hash")
    # A widget in use keeps the focus when the page is drawn again.
    assert page.evaluate("document.activeElement.id") == "option-theta"
    page.focus("#dog [data-scheme=alibi] a")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#scheme').value === 'alibi'")


def test_a_scheme_that_changes_another_one_is_drawn_with_it(open_page: Any) -> None:
    page = open_page("#rope")
    assert page.locator("#decay .legend").count() == 0
    for view, text in (
        ("#rope&scaling=yarn", "without scaling"),
        ("#p_rope", "rope"),
        ("#rerope&causal=1", "rope alone"),
        ("#position_scale&inner=sinusoidal", "sinusoidal alone"),
    ):
        go(page, view)
        assert text in page.inner_text("#decay .legend")
        lines = page.eval_on_selector_all(
            "#decay .chart > svg path.series", "all => all.map((one) => one.getAttribute('d'))"
        )
        assert len(set(lines)) == 2, view


def test_the_chosen_scaling_is_explained(open_page: Any) -> None:
    page = open_page("#rope")
    hints = set()
    for name in ("none", "linear", "ntk", "yarn"):
        page.select_option("#option-scaling", name)
        settle(page)
        hints.add(page.inner_text("#option-scaling-hint"))
    assert len(hints) == 4
    assert any("YaRN" in hint for hint in hints)


@pytest.mark.parametrize(
    "view",
    [
        "#rope&theta=500000&scaling=yarn&factor=8&n=128&heads=2",
        "#t5&weights=initial&num_buckets=16&max_distance=40&causal=1",
        "#rerope&inner=alibi&factor=4&text=one+two+one+two&word=two",
        "#normalized_integer&length=20&subtract_one=true&direction=one_hot",
    ],
)
def test_the_address_restores_a_view(open_page: Any, view: str) -> None:
    page = open_page(view)
    assert page.is_hidden("#problems")
    before = [[content(page, panel) for panel in PANELS], options_of(page)]
    page.locator("#heads").press("ArrowRight")
    settle(page)
    page.locator("#heads").press("ArrowLeft")
    settle(page)
    written = page.evaluate("location.hash")
    assert set(written[1:].split("&")) == set(view[1:].split("&"))
    again = open_page(written)
    assert [[content(again, panel) for panel in PANELS], options_of(again)] == before


def test_an_address_that_cannot_be_understood_is_answered_with_a_sentence(open_page: Any) -> None:
    page = open_page("#rope&theta=-3&color=red&scaling=nothing&n=abc&%E0%A4%A")
    text = page.inner_text("#problems")
    assert "theta cannot be -3" in text
    assert "no option color" in text
    assert "scaling cannot be nothing" in text
    go(page, "#kerple")
    assert page.is_hidden("#problems")


ODD = {
    "empty": "",
    "spaces": "   ",
    "one word": "dog",
    "200 words": " ".join(f"word{i % 50}" for i in range(200)),
    "emoji": "🐕 chased 🐕 👩‍👩‍👧 and 🐕",
    "markup": "<img src=x onerror=alert(1)> <b>dog</b> &amp; <b>dog</b> <script>alert(1)</script>",
    "one long word": "a" * 1500,
    "punctuation": "... !!! ... ???",
    "right to left": "כלב רדף אחרי כלב",
    "prototype": "constructor __proto__ constructor",
}


def test_odd_sentences_do_no_harm(open_page: Any) -> None:
    page = open_page("#alibi", width=400)
    page.on("dialog", lambda dialog: pytest.fail(f"A sentence was run as a script: {dialog.message}"))
    for name, sentence in ODD.items():
        for scheme in ("none", "binary"):
            page.select_option("#scheme", scheme)
            page.fill("#text", sentence)
            settle(page)
            assert page.evaluate(NO_OVERFLOW), (name, scheme)
            assert page.locator("#dog img, #attention img, #attention b, #steps b, main script").count() == 0, name
    page.fill("#text", ODD["200 words"])
    settle(page)
    assert page.locator("#dog .bar[data-distance]").count() > 10 or "No word" in page.inner_text("#dog-note")
    page.fill("#text", "dog")
    settle(page)
    assert "No word occurs twice" in page.inner_text("#dog-note")
    page.select_option("#scheme", "binary")
    page.locator("#option-bits").press("Home")
    page.fill("#text", ODD["emoji"])
    settle(page)
    assert "Too long" in page.inner_text("#attention")


def test_any_repeated_word_is_found_and_can_be_chosen(open_page: Any) -> None:
    page = open_page("#alibi")
    page.fill("#text", "One cat saw a dog, and the cat knew the Dog.")
    settle(page)
    assert page.eval_on_selector_all("#word option", "all => all.map((one) => one.value)") == ["cat", "dog", "the"]
    cat = page.get_attribute("#dog [data-scheme=alibi]", "data-distance")
    page.select_option("#word", "dog")
    settle(page)
    assert page.get_attribute("#dog [data-scheme=alibi]", "data-distance") != cat
    assert float(page.get_attribute("#dog [data-scheme=none]", "data-distance")) == 0.0
    assert "word=dog" in page.evaluate("location.hash")


def test_the_change_caused_by_positions_is_nothing_without_positions(open_page: Any) -> None:
    page = open_page("#none")
    page.select_option("#shown", "change")
    settle(page)
    assert set(page.eval_on_selector_all("#attention .cell", "all => all.map((one) => one.textContent)")) == {".00"}
    page.select_option("#scheme", "alibi")
    settle(page)
    assert len(set(page.eval_on_selector_all("#attention .cell", "all => all.map((one) => one.textContent)"))) > 5


def test_light_and_dark(open_page: Any) -> None:
    def background(page: Any) -> int:
        settle(page)
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))))

    light, dark = (open_page("#sinusoidal", color_scheme=scheme, height=3000) for scheme in ("light", "dark"))
    for page in (light, dark):
        # The contrast of every text that is shown is at least 4.5, the limit of WCAG for text (AA).
        assert page.evaluate(CONTRAST) == []
    assert background(light) > 600
    assert background(dark) < 150
    assert content(light, "#map") != content(dark, "#map")
    for expected in ("light", "dark", "auto", "light"):
        dark.click("#theme")
        assert expected in dark.inner_text("#theme")
    assert background(dark) > 600
    dark.reload()
    dark.wait_for_selector("html[data-ready]")
    assert background(dark) > 600
