"""Reading the HTML of the built site."""

from __future__ import annotations

import posixpath
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_POINTS = ("href", "src", "data")


class Page(HTMLParser):
    """The anchors of a page, what it links to or shows, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in _POINTS and value and tag != "base":
                self.targets.append(value)

    def handle_data(self, data: str) -> None:
        self.text += data

    def local_targets(self) -> list[tuple[str, Path, str]]:
        """Links and images that are files of the site: as written, the file, and the anchor."""
        found = []
        for target in self.targets:
            parts = urlsplit(target)
            if not parts.scheme and not parts.netloc:
                path = posixpath.normpath(posixpath.join(self.path.parent.as_posix(), unquote(parts.path)))
                found.append((target, Path(path) if parts.path else self.path, unquote(parts.fragment)))
        return found


page = cache(Page)
