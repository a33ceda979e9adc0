"""The kinds of figures, and drawing all that apply to a scheme."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.errors import UnknownNameError, UnsupportedError
from hf_posenc.plots.schemes.arrangement import distance_map, layers, position_map
from hf_posenc.plots.schemes.drawing import FigureKind
from hf_posenc.plots.schemes.logits import bias_distance, bias_map, decay, grid, logit_scale
from hf_posenc.plots.schemes.rotations import frequencies, rotation
from hf_posenc.plots.schemes.subject import Subject, subject_of
from hf_posenc.plots.schemes.vectors import difference, dimensions, heat_map
from hf_posenc.plots.style import save, styled
from hf_posenc.schemes.config import SchemeConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: All kinds, the most informative first.
KINDS: tuple[FigureKind, ...] = (
    layers, position_map, distance_map, grid, bias_distance, bias_map, heat_map, logit_scale, rotation, frequencies,
    decay, dimensions, difference,
)  # fmt: skip


def kind_named(name: str) -> FigureKind:
    """Returns the kind of figure called `name`.

    Raises:
        UnknownNameError: if there is none. The message names similar kinds.
    """
    by_name = {kind.name: kind for kind in KINDS}
    if name not in by_name:
        raise UnknownNameError("kind of figure", name, by_name, listing="`hf-posenc plot SCHEME --list`")
    return by_name[name]


def applicable_kinds(subject: Subject) -> list[FigureKind]:
    """Returns the kinds that can show this scheme."""
    return [kind for kind in KINDS if kind.applies(subject)]


def draw_kind(kind: FigureKind, subject: Subject, dark: bool = False) -> Figure:
    """Draws one figure of a scheme, in the shared style for a light or a dark page.

    Raises:
        UnsupportedError: if the kind does not apply to this scheme.
    """
    if not kind.applies(subject):
        known = ", ".join(other.name for other in applicable_kinds(subject))
        raise UnsupportedError(
            f"The scheme {subject.config.name!r} has nothing to show in a figure of kind {kind.name!r} "
            f"({kind.summary}). Kinds that apply to it: {known}."
        )
    with styled(dark):
        return kind.draw(subject)


def plot_scheme(
    config: SchemeConfig, folder: str | Path, kinds: Iterable[str] | None = None, dark: bool = False
) -> list[Path]:
    """Draws a scheme as PNG and SVG, one pair of files per kind of figure.

    Args:
        config: the scheme.
        folder: folder for the files, created if missing. They are named `<scheme>_<kind>`.
        kinds: names of kinds; by default all that apply.
        dark: whether to draw for a dark page. The files are then named `<scheme>_<kind>_dark`.

    Returns:
        The paths, alternating between PNG and SVG.

    Raises:
        UnknownNameError: for a kind that does not exist.
        UnsupportedError: for a kind that does not apply to the scheme.
        ValueError: if the scheme cannot be built at any of the standard places.
    """
    subject = subject_of(config)
    wanted = applicable_kinds(subject) if kinds is None else [kind_named(name) for name in dict.fromkeys(kinds)]
    figures = [(kind.name, draw_kind(kind, subject, dark)) for kind in wanted]
    paths: list[Path] = []
    for name, figure in figures:
        file = f"{config.name}_{name}{'_dark' * dark}"
        with styled(dark):
            paths += [save(figure, Path(folder, f"{file}.{ending}"), dpi=100) for ending in ("png", "svg")]
    return paths
