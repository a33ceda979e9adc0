"""Extension of position tables to more positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

#: Methods to extend a table past the positions of the old scheme.
TABLE_EXTENSIONS = ("linear", "spline", "repeat", "last")


def extended_rows(rows: Tensor, num_positions: int, extension: str) -> Tensor:
    """Extends a table to more positions.

    - "linear": the old rows are spread evenly over all positions, with linear interpolation in between (position
      interpolation, arXiv:2306.15595, for tables). Adjacent rows become more similar, and short inputs get other rows
      than before.
    - "spline": the same with a natural cubic spline.
    - "repeat": position p gets the row of `p % old_positions`, as in Longformer's conversion (arXiv:2004.05150, section
      5). The first rows do not change, so the results for short inputs do not change either.
    - "last": all positions past the old rows share the last row, as in PreSumm.

    Args:
        rows: `(old_positions, hidden)`.
        num_positions: number of positions of the new table, at least `old_positions`.
        extension: one of `TABLE_EXTENSIONS`.

    Returns:
        `(num_positions, hidden)` float32.

    Raises:
        ValueError: for an unknown extension, or if the table would become shorter.
    """
    rows = rows.float()
    old = rows.shape[0]
    if num_positions < old:
        raise ValueError(
            f"A table of {old} positions cannot be extended to {num_positions} positions: that would truncate it."
        )
    if extension == "linear":
        stretched = functional.interpolate(rows.T.unsqueeze(0), size=num_positions, mode="linear", align_corners=True)
        return stretched.squeeze(0).T
    if extension == "spline":
        return _spline(rows, num_positions)
    if extension == "repeat":
        return rows[torch.arange(num_positions, device=rows.device) % old]
    if extension == "last":
        return rows[torch.arange(num_positions, device=rows.device).clamp(max=old - 1)]
    raise ValueError(f"table_extension is {extension!r}; expected one of {', '.join(TABLE_EXTENSIONS)}.")


def _spline(rows: Tensor, num_positions: int) -> Tensor:
    """Evaluates the natural cubic spline through the rows at `num_positions` evenly spaced points.

    With unit knots the second derivatives m solve m[i-1] + 4 m[i] + m[i+1] = 6 (y[i-1] - 2 y[i] + y[i+1]), and are 0
    at both ends.
    """
    old = rows.shape[0]
    if old < 3:
        return extended_rows(rows, num_positions, "linear")
    values = rows.double()
    system = torch.diag(torch.full((old - 2,), 4.0, dtype=torch.float64, device=rows.device))
    ones = torch.ones(old - 3, dtype=torch.float64, device=rows.device)
    system = system + torch.diag(ones, 1) + torch.diag(ones, -1)
    curvature = torch.zeros_like(values)
    curvature[1:-1] = torch.linalg.solve(system, 6 * (values[:-2] - 2 * values[1:-1] + values[2:]))
    places = torch.linspace(0, old - 1, num_positions, dtype=torch.float64, device=rows.device)
    low = places.floor().long().clamp(max=old - 2)
    b = (places - low).unsqueeze(1)
    a = 1 - b
    bend = ((a**3 - a) * curvature[low] + (b**3 - b) * curvature[low + 1]) / 6
    return (a * values[low] + b * values[low + 1] + bend).float()
