"""Images for dark pages: next to `name.png` there may be `name_dark.png`, which is then shown on dark pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class DarkImages(SphinxTransform):
    """Shows both images of a pair. The theme hides one of them by its class."""

    # Before Sphinx collects the images of a page.
    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Adds the dark images of one page."""
        for image in list(self.document.findall(nodes.image)):
            if "://" in image["uri"]:
                continue
            stem, _dot, ending = image["uri"].rpartition(".")
            uri = f"{stem}_dark.{ending}"
            relative, path = self.env.relfn2path(uri, self.env.docname)
            # Changes to the dark image make the page out of date, as changes to the other one do.
            self.env.note_dependency(relative)
            if Path(path).is_file():
                dark = image.deepcopy()
                dark["uri"] = uri
                image["classes"].append("only-light")
                dark["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, dark)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    app.add_transform(DarkImages)
    return {"parallel_read_safe": True}
