"""Links from pages to files of the repository outside docs/, which work on GitHub and in the site.

A page of the site links to a file in the same way as any Markdown on GitHub, by its relative path. In the site:

- Markdown files that `repository_pages` names (globs) are pages of the site: they are copied to `docs/repository/`.
- The explorer is copied as it is, because it is a static page.
- A link to any other file leads to the file at `repository_url`, if that is set, or else to a page that shows its text.
"""

from __future__ import annotations

import posixpath
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import find_lexer_class_for_filename
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

COPIES = "repository"


def write_if_changed(path: Path, text: str) -> None:
    """Writes a generated page, unless it is there already: Sphinx then reads it again only if it differs."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def copy_pages(app: Sphinx) -> None:
    """Copies the Markdown files that are pages of the site, and removes copies of files that are gone."""
    root, copies = app.srcdir.parent, Path(app.srcdir) / COPIES
    found = {path.relative_to(root) for pattern in app.config.repository_pages for path in root.glob(pattern)}
    for path in found:
        others = sorted(other.stem for other in found if other.parent == path.parent and other != path)
        text = (root / path).read_text(encoding="utf-8")
        if path.name == "README.md" and others:
            text += "\n```{toctree}\n:hidden:\n" + "\n".join(others) + "\n```\n"
        write_if_changed(copies / path, text)
    for path in copies.rglob("*.md"):
        if path.relative_to(copies) not in found:
            path.unlink()


class RepositoryLinks(SphinxPostTransform):
    """Resolves links to files that are not pages of docs/, before MyST warns of them."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        """Resolves the links of one page."""
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") == "myst" and node["reftarget"] not in self.env.found_docs:
                self._resolve(node, *self._target(node))
        for node in list(self.document.findall(addnodes.download_reference)):
            if "://" not in node["reftarget"]:
                self._resolve(node, self._path(node["reftarget"]), None)

    def _target(self, node: addnodes.pending_xref) -> tuple[str, str | None]:
        """The path that a link names, from the root of the repository, and its anchor."""
        if node.get("refdomain") == "doc":
            # MyST has made an absolute path of it, without the ending.
            path = posixpath.relpath(f"{node['reftarget']}.md", str(self.app.srcdir.parent))
            return path, node.get("reftargetid")
        path, _, anchor = node["reftarget"].partition("#")
        return self._path(path), anchor or None

    def _path(self, target: str) -> str:
        folder = posixpath.dirname(self.env.docname)
        copied = folder == COPIES or folder.startswith(f"{COPIES}/")
        base = folder.removeprefix(COPIES).strip("/") if copied else posixpath.join("docs", folder)
        return posixpath.normpath(posixpath.join(base, target))

    def _resolve(self, node: nodes.Element, path: str, anchor: str | None) -> None:
        page = posixpath.join(COPIES, path).removeprefix(f"{COPIES}/docs/").removesuffix(".md")
        if path.endswith(".md") and page in self.env.found_docs:
            node["refdomain"], node["reftarget"], node["reftargetid"] = "doc", page, anchor
            return
        file = Path(self.app.srcdir).parent / path
        if path.startswith("docs/explorer/") and file.is_file():
            # MyST has dropped the anchor. A link to a part of the explorer has to be written in HTML.
            uri = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(self.env.docname) or ".")
        elif path.startswith("docs/") or not file.is_file():
            return
        elif self.config.repository_url:
            uri = f"{self.config.repository_url}/blob/main/{path}"
        else:
            self.env.repository_files.add(path)  # type: ignore[attr-defined]
            uri = self.app.builder.get_relative_uri(self.env.docname, f"_files/{path}")
        node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=False))


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages that show files."""
    for path in sorted(app.env.repository_files):  # type: ignore[attr-defined]
        lexer = find_lexer_class_for_filename(path)
        language = lexer.aliases[0] if lexer is not None else "text"
        text = (app.srcdir.parent / path).read_text(encoding="utf-8")
        body = app.builder.highlighter.highlight_block(text, language)  # type: ignore[attr-defined]
        yield f"_files/{path}", {"title": path, "body": f"<h1>{path}</h1>{body}"}, "page.html"


def link_repository(app: Sphinx, config: Any) -> None:
    """Puts a link to the repository into the header of the site, if its address is known."""
    if config.repository_url and config.html_theme == "pydata_sphinx_theme":
        link = {"name": "Repository", "url": config.repository_url, "icon": "fa-brands fa-github"}
        config.html_theme_options["icon_links"] = [link]


def forget(app: Sphinx) -> None:
    """Only the files that pages of this build link to are written; others are there from earlier builds."""
    app.env.repository_files = set()  # type: ignore[attr-defined]


def copy_explorer(app: Sphinx, exception: Exception | None) -> None:
    """Copies docs/explorer next to the pages."""
    explorer = Path(app.srcdir) / "explorer"
    if exception is None and explorer.is_dir():
        shutil.copytree(explorer, Path(app.outdir) / "explorer", dirs_exist_ok=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    app.add_config_value("repository_pages", [], "env", types=(list,))
    app.add_config_value("repository_url", "", "env", types=(str,))
    app.add_post_transform(RepositoryLinks)
    app.connect("config-inited", link_repository)
    app.connect("builder-inited", copy_pages)
    app.connect("builder-inited", forget)
    app.connect("html-collect-pages", file_pages)
    app.connect("build-finished", copy_explorer)
    return {"parallel_read_safe": True}
