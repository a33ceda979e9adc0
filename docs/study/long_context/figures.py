"""The figures of the study of longer texts: losses by length, one figure per claim, and where facts were found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from docs.study.long_context.material import BEFORE, DEPTHS, METHODS, NEEDLE_LENGTHS, TARGETS, TRAINED
from docs.study.long_context.verdicts import MARGIN, Losses, Verdict, verdicts
from hf_posenc.plots.curves import Curve, draw_curves, name_lines, ticks_at
from hf_posenc.plots.style import palette, png_of, shade, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What the horizontal axis of a claim shows.
_COMPARED = {
    "A": f"difference to native, {BEFORE[0]:,} tokens before (nats)",
    "B": f"difference to native, {BEFORE[-1]:,} tokens before (nats)",
    "C": f"difference to native with {BEFORE[1]:,} tokens before (nats)",
}


def draw_all(losses: Losses, rows: Iterable[Mapping[str, Any]]) -> dict[str, bytes]:
    """The PNG of every figure by the name of its file, for light and dark pages."""
    needles = [row for row in rows if row["part"] == "needles" and row["before"] == max(NEEDLE_LENGTHS)]
    kinds: dict[str, Callable[[Axes], None]] = {"losses": partial(_losses, losses=losses)}
    found = verdicts(losses)
    kinds |= {f"claim_{claim.lower()}": partial(_claim, claim=claim, found=found) for claim in _COMPARED}
    kinds |= {"needles": partial(_needles, rows=needles)} if needles else {}
    return {f"{name}{'_dark' * dark}.png": _drawn(draw, dark) for name, draw in kinds.items() for dark in (False, True)}


def _drawn(draw: Callable[[Axes], None], dark: bool) -> bytes:
    from matplotlib.figure import Figure

    with styled(dark):
        figure = Figure(figsize=(5.8, 3.9))
        draw(figure.add_subplot())
        return png_of(figure, dpi=120, colors=64)


def _losses(axes: Axes, losses: Losses) -> None:
    curves = {method: Curve(BEFORE, [float(losses[method, before].mean()) for before in BEFORE]) for method in METHODS}
    axes.set_xscale("log", base=2)
    ticks_at(axes, BEFORE)
    axes.set(xlabel=f"tokens before the last {TARGETS} (dotted: trained length)", ylabel="loss (nats per token)")
    axes.axvline(TRAINED - TARGETS, color=shade(0.5), linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
    draw_curves(axes, curves, list(METHODS))
    name_lines(axes)


def _claim(axes: Axes, claim: str, found: Mapping[tuple[str, str], Verdict]) -> None:
    """The interval of each method; filled if the claim about it is confirmed."""
    methods = [method for method in METHODS if (claim, method) in found]
    color = palette()[0]
    for height, method in enumerate(reversed(methods)):
        verdict = found[claim, method]
        difference, inside = verdict.difference, color if verdict.passed else shade(0.0)
        axes.plot([difference.low, difference.high], [height, height], color=color)
        axes.plot(difference.value, height, marker="o", color=color, markerfacecolor=inside)
    axes.set_yticks(range(len(methods)), list(reversed(methods)))
    axes.set_xlabel(_COMPARED[claim])
    axes.axvline(0, color=shade(0.5), linewidth=1.0, zorder=1)
    if claim == "C":
        axes.set_xscale("symlog", linthresh=0.01)  # One method is a hundred times as far away as the others.
    if claim == "A":
        axes.axvspan(-MARGIN, MARGIN, color=shade(0.08), zorder=0, linewidth=0)


def _needles(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    """Which facts each method found; a share where it read several texts."""
    found: dict[tuple[str, float], list[bool]] = {}
    for row in rows:
        for depth, right in zip(row["depths"], row["right"], strict=True):
            found.setdefault((row["method"], depth), []).append(right)
    methods = [method for method in METHODS if any(name == method for name, _ in found)]
    shares = [[sum(found[method, depth]) / len(found[method, depth]) for depth in DEPTHS] for method in methods]
    axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for y, method in enumerate(methods):
        for x, depth in enumerate(DEPTHS):
            right = found[method, depth]
            color = "black" if shares[y][x] > 0.5 else "white"
            axes.text(x, y, f"{sum(right)}/{len(right)}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS])
    axes.set_yticks(range(len(methods)), methods)
    axes.set_xlabel(f"place of the fact in {max(NEEDLE_LENGTHS):,} tokens")
    axes.grid(visible=False)
