"""The explorer in a real Chromium, over a web server on the loopback interface, under a sub-path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import served

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Of the explorer under the sub-path that it has on the documentation site."""
    with served(DOCS) as root:
        yield f"{root}/explorer/index.html"


@pytest.fixture
def open_page(chromium: Any, address: str) -> Iterator[Any]:
    """`open_page(hash, width=..., color_scheme=...)` returns a page that has drawn everything.

    The test fails if anything was written to the console, or a request failed.
    """
    complaints: list[str] = []
    contexts = []

    def opened(hash: str = "", *, width: int = 1280, height: int = 800, root: str = address, **settings: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
        page.on("response", lambda answer: answer.ok or complaints.append(f"{answer.status}: {answer.url}"))
        page.goto(root + hash)
        page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
