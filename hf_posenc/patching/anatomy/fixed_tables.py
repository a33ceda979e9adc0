"""Comparing tables of sines and cosines row by row with their formula."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.anatomy.offloading import onload_weights
from hf_posenc.patching.anatomy.sites import FixedTable, Stack
from hf_posenc.schemes import SinusoidalConfig
from hf_posenc.schemes.additive.sinusoidal import LAYOUTS
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import AdditiveEncoding
from hf_posenc.schemes.positions import Positions

#: Rows computed at a time. CTRL's table has 50,000 rows of width 1280.
_ROWS = 4096
#: Allowed error of an angle per position. Angles computed in float32 have an error of about 5e-8 times the position.
_ANGLE_ERROR = 2e-7


def vectors_of(config: SchemeConfig, width: int) -> AdditiveEncoding | None:
    """The additive part of a scheme; `None` if it cannot be built for vectors of this width."""
    try:
        return config.build(BuildContext(hidden_size=width, num_heads=1, head_dim=width)).additive
    except (ValueError, PositionEncodingError):
        return None


def reproduces(
    config: SinusoidalConfig, rows: Tensor, origin: int, *, rounding: float = 0.0, angle_error: float = 0.0
) -> bool:
    """Whether the rows from `origin` on are the encodings of positions 0, 1, 2, ...

    Args:
        config: the formula.
        rows: `(rows, width)`.
        origin: the row of position 0.
        rounding: allowed difference, in addition to 1e-4.
        angle_error: additional allowed difference, multiplied by the position.
    """
    additive = vectors_of(config, rows.shape[1])
    if additive is None:
        return False
    for start in range(origin, rows.shape[0], _ROWS):
        found = rows[start : start + _ROWS].detach().float()
        ids = torch.arange(start - origin, start - origin + found.shape[0], device=rows.device).unsqueeze(0)
        expected = additive(Positions(ids, ids[:, -1:] + 1))[0].float()
        if not ((found - expected).abs() <= 1e-4 + rounding + angle_error * ids[0].unsqueeze(-1)).all():
            return False
    return True


def sinusoids_like(rows: Tensor, origin: int = 0) -> SinusoidalConfig | None:
    """The formula that gives the rows from `origin` on; `None` if there is none, or on the meta device."""
    rounding = 0.0 if rows.dtype == torch.float32 else torch.finfo(rows.dtype).eps
    for frequencies, layout in itertools.product(("vaswani", "tensor2tensor"), LAYOUTS):
        config = SinusoidalConfig(frequencies=frequencies, layout=layout, offset=origin)
        if not rows.is_meta and reproduces(config, rows, origin, rounding=rounding):
            return config
    return None


def check_fixed_tables(tables: list[FixedTable], stack: Stack) -> None:
    """Compares every row of an architecture's tables with their formula.

    The formula comes from the declaration of the architecture. A run on a few tokens would check only the first rows.
    Tables on the meta device are not checked.

    Raises:
        UnsupportedError: if a table has other values.
    """
    formula = SinusoidalConfig(layout="concatenated")
    for module, name in tables:
        with onload_weights(module):
            rows = getattr(module, name)
            if rows.device.type == "meta":
                continue
            if not reproduces(formula, rows, 0, rounding=torch.finfo(rows.dtype).eps, angle_error=_ANGLE_ERROR):
                raise UnsupportedError(
                    f"`{name}` of a {type(module).__name__} in this {type(stack.module).__name__} does not match the "
                    "declaration of its architecture: its rows are not the usual sines and cosines of their positions "
                    "(base 10000), and no scheme describes it. Any scheme can replace it, and unpatch_model restores "
                    "it."
                )
