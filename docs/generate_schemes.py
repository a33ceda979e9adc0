"""Writes docs/schemes/: a page with figures for every registered scheme, their index, and docs/gallery.md.

python docs/generate_schemes.py              # everything, a minute or two on one core
python docs/generate_schemes.py --no-figures # the text only
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from scheme_pages import GROUPS, Page, PageFigure, all_pages, default_config, group_of  # noqa: E402
from scheme_text import body, facts_text, linked, options_text, summary, use_text  # noqa: E402

from hf_posenc.plots.schemes import KINDS, applicable_kinds, draw_kind, kind_named  # noqa: E402
from hf_posenc.plots.schemes.subject import standard_places  # noqa: E402
from hf_posenc.plots.style import save_figure, styled  # noqa: E402
from hf_posenc.report.tables import markdown_table  # noqa: E402
from hf_posenc.schemes import NativeConfig  # noqa: E402

NOTICE = "<!-- Written by docs/generate_schemes.py. Edits are lost. -->"


def main() -> int:
    """Writes everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-figures", action="store_true", help="write the text only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pages = all_pages()
    for path, text in texts(pages).items():
        target = HERE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    if not arguments.no_figures:
        draw(pages, HERE / "schemes" / "figures")
    print(f"{len(pages)} pages, {sum(len(page.figures) for page in pages)} figures", file=sys.stderr)
    return 0


def texts(pages: list[Page]) -> dict[str, str]:
    """The content of every Markdown file, by its path under docs/."""
    written = {f"schemes/{page.name}.md": page_text(page) for page in pages}
    return written | {"schemes/README.md": index_text(pages), "gallery.md": gallery_text(pages)}


def draw(pages: list[Page], folder: Path) -> None:
    """Draws the figures of all pages, and removes those that no page shows any more."""
    folder.mkdir(parents=True, exist_ok=True)
    kept: set[Path] = set()
    for page in pages:
        for figure in page.figures:
            drawn = draw_kind(kind_named(figure.kind), figure.subject)
            with styled():
                kept.update(save_figure(drawn, folder, figure.stem, dpi=100, palette_size=256))
    for path in sorted(set(folder.iterdir()) - kept):
        path.unlink()


def page_text(page: Page) -> str:
    """The whole page of a scheme."""
    first, *others = (_figure_text(figure, "figures") for figure in page.figures)
    sections = [f"# `{page.name}`", NOTICE, summary(page.config_class), first]
    described = body(page.config_class)
    sections += ["## How it works", described] if described else []
    sections += ["## Options", options_text(page.config_class), "## Facts", facts_text(page), "## Use", use_text(page)]
    kinds = ", ".join(f"`{kind.name}`" for kind in applicable_kinds(page.subject))
    # A scheme that needs options is not drawn by its name alone.
    command = (
        f"hf-posenc plot {page.name}" if default_config(page.config_class) else "hf_posenc.plots.schemes.plot_scheme"
    )
    sections += ["## More figures", *others, f"`{command}` draws every kind that applies: {kinds}."]
    return "\n\n".join(sections) + "\n"


def index_text(pages: list[Page]) -> str:
    """docs/schemes/README.md."""
    arranged = sum(page.config_class.combinator for page in pages)
    sections = [
        "# Schemes",
        NOTICE,
        f"The {len(pages) - arranged} schemes and {arranged} arrangements of schemes, by what they act on. "
        "Each has a page with its formula, its options and figures; the [gallery](../gallery.md) shows one figure of "
        "each. Written by "
        "`python docs/generate_schemes.py` from the docstrings of the configs.",
    ]
    for group in GROUPS:
        members = [page for page in pages if group_of(page) == group]
        rows = [
            (f"[`{page.name}`]({page.name}.md)", summary(page.config_class).replace("|", "\\|")) for page in members
        ]
        if rows:
            sections += [f"## {group}", markdown_table(("scheme", "what it is"), rows)]
    # It has no figure, because it stands for the scheme of a model and there is no model here.
    sections.append(
        f"`{NativeConfig.name}` has no page, because it is not a scheme: wherever a scheme can be named, it stands "
        'for the original scheme of the model, as in `inner="native"` or `["native", "ssmax"]`. '
        "`native_scheme(model)` returns that scheme, and [Architectures](../reference/architectures.md) lists it for each "
        "architecture."
    )
    return "\n\n".join(sections) + "\n"


def gallery_text(pages: list[Page]) -> str:
    """docs/gallery.md."""
    place = standard_places()[0]
    sections = [
        "# Gallery",
        NOTICE,
        "One figure of every scheme; the linked pages contain more. `hf-posenc plot SCHEME` draws all kinds of "
        "figures that apply to a scheme, with options of your choice. Unless a caption says otherwise, a scheme is "
        f"drawn with its default options in a causal model of {place.num_heads} heads of {place.head_dim} dimensions, "
        f"with a hidden size of {place.hidden_size} and {place.max_positions} positions, before any training. Written "
        "by `python docs/generate_schemes.py`.",
        "## Kinds of figures",
        _kinds_text(pages),
    ]
    for group in GROUPS:
        members = [page for page in pages if group_of(page) == group]
        if not members:
            continue
        sections.append(f"## {group}")
        for page in members:
            heading = f"### [`{page.name}`](schemes/{page.name}.md)"
            sections += [heading, summary(page.config_class), _figure_text(page.figures[0], "schemes/figures")]
    return "\n\n".join(sections) + "\n"


def _kinds_text(pages: list[Page]) -> str:
    rows = []
    for kind in KINDS:
        shown = [
            f"[`{page.name}`](schemes/figures/{figure.stem}.png)"
            for page in sorted(pages, key=lambda page: page.name not in ("rope", "alibi", "sinusoidal"))
            for figure in page.figures
            if figure.kind == kind.name
        ]
        rows.append((f"`{kind.name}`", kind.summary, (shown or ["none in these pages"])[0]))
    return markdown_table(("kind", "what it shows", "example"), rows)


def _figure_text(figure: PageFigure, folder: str) -> str:
    alternative = f"{figure.subject.config.name}: {kind_named(figure.kind).summary}"
    caption = linked(figure.caption)
    return f"![{alternative}]({folder}/{figure.stem}.png)\n\n{caption} ([SVG]({folder}/{figure.stem}.svg))"


if __name__ == "__main__":
    sys.exit(main())
