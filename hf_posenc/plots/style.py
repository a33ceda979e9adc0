"""The shared style of all figures, for light and dark pages: one colour, dash and marker per scheme."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.installation import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's palette for colour-blind readers, without its yellow, which is too pale for lines, plus a grey, a
#: purple and a brown. A dark page has lighter versions of the same hues.
_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F", "#6A3D9A", "#8C510A")
_DARK = ("#4C9FE6", "#F5793A", "#27C196", "#E69AC4", "#A5DBFF", "#F6C145", "#FFFFFF", "#969696", "#B48EED", "#C9995A")
_MARKERS = "osD^vPX*<>"
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))

#: Perceptually uniform maps for colour-blind readers, for numbers of one sign and for signed numbers around zero.
SEQUENTIAL_MAP = "cividis"
DIVERGING_MAP = "RdBu_r"
#: A colour that stands out on every map and page.
HIGHLIGHT = "#E4572E"

#: The schemes that are compared most often look the same in every figure.
FIXED_LOOKS = {"alibi": 0, "learned": 1, "rope": 2, "sinusoidal": 3, "t5": 4, "binary": 5, "none": 6, "integer": 7}

_SETTINGS = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_posenc",
    "figure.constrained_layout.use": True,
}
#: Colours of the page, the text and the grid. The dark page is that of the documentation site.
_PAGES = {False: ("#FFFFFF", "#1A1A1A", "#E5E5E5"), True: ("#14181E", "#DDE2E8", "#2C333D")}


@contextmanager
def styled(dark: bool = False) -> Iterator[None]:
    """Makes matplotlib draw with the shared settings, for a light or a dark page, within this context."""
    require("A figure", "matplotlib")
    import matplotlib
    from cycler import cycler

    page, text, grid = _PAGES[dark]
    colors: dict[str, Any] = {"figure.facecolor": page, "axes.facecolor": page, "grid.color": grid, "text.color": text}
    colors |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), text)
    colors["axes.prop_cycle"] = cycler(color=_DARK if dark else _LIGHT)
    with matplotlib.rc_context(_SETTINGS | colors):
        yield


@contextmanager
def titled_figure(
    title: str, size: tuple[float, float], path: str | Path | None = None, dark: bool = False
) -> Iterator[Figure]:
    """Yields a figure with a title to draw in, of `size` in inches, and then saves it if there is a path."""
    with styled(dark):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size)
        figure.suptitle(title, fontsize=11)
        yield figure
        if path is not None:
            save(figure, path)


def palette() -> list[str]:
    """Returns the line colours for the current page."""
    import matplotlib

    return list(matplotlib.rcParams["axes.prop_cycle"].by_key()["color"])


def shade(strength: float) -> str:
    """Returns a grey for the current page: 0 is the colour of the page, 1 that of its text."""
    import matplotlib
    from matplotlib.colors import to_hex, to_rgb

    ends = (to_rgb(matplotlib.rcParams[key]) for key in ("figure.facecolor", "text.color"))
    return to_hex([page + strength * (text - page) for page, text in zip(*ends, strict=True)])


def line_style(scheme: str, schemes: list[str]) -> dict[str, Any]:
    """Returns keywords for `plot`: the colour, dash and marker of one of the `schemes` in a figure.

    No two schemes in a figure look the same: after ten colours, the dashes and markers change.
    """
    colors = palette()
    taken = {FIXED_LOOKS[name] for name in schemes if name in FIXED_LOOKS}
    free = [slot for slot in range(len(colors) + len(schemes)) if slot not in taken]
    others = [name for name in schemes if name not in FIXED_LOOKS]
    slot = FIXED_LOOKS[scheme] if scheme in FIXED_LOOKS else free[others.index(scheme)]
    turn = slot // len(colors)
    return {
        "color": colors[slot % len(colors)],
        "marker": _MARKERS[(slot + turn) % len(_MARKERS)],
        "linestyle": DASHES[turn % len(DASHES)],
    }


def png_of(figure: Figure, dpi: int = 110, colors: int = 256) -> bytes:
    """Returns the figure as a small PNG with a palette of at most `colors` colours."""
    from PIL import Image

    drawing, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(drawing, format="png", dpi=dpi, metadata={"Software": None})
    with Image.open(drawing) as image:
        image.convert("RGB").quantize(colors, dither=Image.Dither.NONE).save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def save(figure: Figure, path: str | Path, dpi: int = 110, colors: int = 256) -> Path:
    """Saves a figure in the format of the file's extension. A PNG has a palette of at most `colors` colours.

    `dpi` is the resolution of a PNG, and of the rasterised parts of an SVG.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        path.write_bytes(png_of(figure, dpi, colors))
    else:
        figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
