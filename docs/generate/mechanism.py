"""`mechanism.png`, also dark: how one vector is a whole matrix of biases, drawn from the library's own memory layout.

python docs/generate/mechanism.py --output_dir docs/results/price
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.attention.forms import distance_form
from hf_posenc.plots.style import DIVERGING_MAP, save, styled
from hf_posenc.schemes import AlibiConfig, BuildContext
from hf_posenc.schemes.parts import DistanceBias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TOKENS = 8


def main() -> None:
    """Draws the bias as a matrix, with its queries reversed, and as the vector that the second one is a view of."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("docs/results/price"))
    folder = parser.parse_args().output_dir
    bias = AlibiConfig().build(BuildContext(hidden_size=8, num_heads=1, head_dim=8, causal=True)).logit_bias
    assert isinstance(bias, DistanceBias)
    form = distance_form(bias, 0, _TOKENS, _TOKENS, torch.device("cpu"))
    # In units of the slope.
    vector = form.vector[0] / form.vector[0, _TOKENS - 2].abs()
    vector[_TOKENS:] = -torch.inf
    for dark in (False, True):
        with styled(dark):
            path = folder / f"mechanism{'_dark' * dark}.png"
            print(f"Written to {save(_drawn(vector), path, colors=64)}")


def _drawn(vector: Tensor) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    reversed_queries = vector.as_strided((_TOKENS, _TOKENS), (1, 1))
    figure = Figure(figsize=(7.0, 5.0))
    grid = figure.add_gridspec(2, 2, height_ratios=(4, 1))
    matrix, hankel, line = (figure.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    _draw(matrix, reversed_queries.flip(0), "The bias: constant along diagonals")
    _draw(hankel, reversed_queries, "Queries reversed: entry i + j")
    _draw(line, vector.unsqueeze(0), f"One head in memory: {2 * _TOKENS - 1} numbers")
    matrix.set(xlabel="key", ylabel="query")
    hankel.set(xlabel="key", ylabel="query, the last one first")
    hankel.set_yticks(range(0, _TOKENS, 2), list(map(str, range(_TOKENS - 1, -1, -2))))
    line.set(xlabel="index; each row of the right matrix starts one further", yticks=[])
    for row in (0, 3):
        # The outline of a query's window.
        for axes, corner in ((line, (row, 0)), (hankel, (0, row))):
            place = (corner[0] - 0.5, corner[1] - 0.5)
            axes.add_patch(Rectangle(place, _TOKENS, 1, fill=False, linewidth=2.5, edgecolor="black"))
    return figure


def _draw(axes: Axes, values: Tensor, title: str) -> None:
    from matplotlib import colormaps

    shown = colormaps[DIVERGING_MAP].copy()
    shown.set_bad("0.82")
    axes.imshow(values.masked_fill(values.isinf(), torch.nan), cmap=shown, vmin=-_TOKENS, vmax=_TOKENS)
    axes.set_title(title)
    axes.grid(visible=False)
    for row, numbers in enumerate(values.tolist()):
        for column, value in enumerate(numbers):
            text = "−∞" if value == -torch.inf else f"{value + 0:.0f}".replace("-", "−")
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="black")


if __name__ == "__main__":
    main()
