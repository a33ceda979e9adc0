"""Are logits the same when all tokens move on together?"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.metrics.properties.measurement import Measurement, not_evaluated
from hf_posenc.metrics.properties.specimen import (
    TRAINING_LENGTH,
    Specimen,
    build_specimen,
    collecting_refusals,
    positions_at,
    random_contents,
)
from hf_posenc.schemes.config import SchemeConfig

SHIFTS = (1, 17, 500, 4000, 30000)
#: Parts compute angles in float32, which rounds one of 30000 radians by up to 1e-3, for the query and for the key. (In
#: float64 relative schemes would stay below 1e-9; those that are not relative exceed 1e-2.)
RELATIVE_UP_TO = 2e-3


@torch.no_grad()
def relativity(scheme: str | SchemeConfig | Specimen, *, shifts: tuple[int, ...] = SHIFTS) -> Measurement:
    """The largest change of a logit when all positions move by the same shift.

    Measured with random contents, in two sets of 96 positions: the first ones, and a random selection below twice the
    training length, for schemes that treat near and far keys differently. For additive schemes the logits are
    `(x_i + PE_i) W_q . W_k (x_j + PE_j)`, contents included. The sequence keeps its length, for schemes that read it.
    Changes are relative to the largest logit where that is more than 1; only pairs that the scheme may see are
    compared. Passes up to 2e-3.

    Args:
        scheme: a name, a config, or a built specimen.
        shifts: in positions.

    Returns:
        `value` is the largest change; `details["by_shift"]` the largest for each shift.
    """
    specimen = build_specimen(scheme)
    refused: list[str] = []
    by_shift: dict[int, float] = {}
    for name, ids in _windows().items():
        contents, lengths = random_contents(1, ids.shape[0]), ids[-1:].unsqueeze(0) + 1
        unmoved = None
        with collecting_refusals(refused, f"{name} positions"):
            unmoved = specimen.logits(positions_at(ids, lengths=lengths), contents)
        if unmoved is None:
            continue
        for shift in shifts:
            with collecting_refusals(refused, f"{name} positions moved by {shift}"):
                moved = specimen.logits(positions_at(ids + shift, lengths=lengths), contents)
                by_shift[shift] = max(by_shift.get(shift, 0.0), logit_change(specimen, moved, unmoved))
    if not by_shift:
        return not_evaluated(refused)
    value = max(by_shift.values())
    return Measurement(value <= RELATIVE_UP_TO, value, RELATIVE_UP_TO, {"by_shift": by_shift}, tuple(refused))


def logit_change(specimen: Specimen, logits: Tensor, reference: Tensor) -> float:
    """The largest difference on visible pairs, relative to the largest logit where that is more than 1."""
    visible = specimen.visible(logits.shape[-1])
    reference = reference[..., visible]
    difference = (logits[..., visible] - reference).abs().max() / reference.abs().max().clamp(min=1)
    # Not a number is no small change.
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")))


def _windows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randperm(2 * TRAINING_LENGTH, generator=generator)[:96].sort().values
    return {"near": torch.arange(96), "spread": spread}
