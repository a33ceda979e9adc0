"""Is a scheme defined past the length it was built for, and do its logits stay bounded there?"""

from __future__ import annotations

import torch

from hf_posenc.metrics.properties.measurement import Measurement
from hf_posenc.metrics.properties.specimen import (
    TRAINING_LENGTH,
    Specimen,
    build_specimen,
    collecting_refusals,
    positions_at,
    random_contents,
)
from hf_posenc.schemes.config import SchemeConfig

FAR = (2 * TRAINING_LENGTH, 4 * TRAINING_LENGTH, 30000)
#: Far logits may exceed near ones by this factor: logarithmic temperatures grow by less up to 30000 positions.
BOUNDED_UP_TO = 2.0


@torch.no_grad()
def defined_past_training(scheme: str | SchemeConfig | Specimen, *, far: tuple[int, ...] = FAR) -> Measurement:
    """Whether a scheme can be evaluated past the training length, with finite logits of the usual size.

    This is what can be said about extrapolation without training, and it is necessary, not sufficient: RoPE passes,
    and models trained with it still collapse there. Whether the *loss* holds up is measured by training
    (`hf-posenc compare`).

    48 tokens at the start of a sequence and 48 at its far end attend to each other. Passes where all logits are finite,
    and the largest is at most twice the largest within the training length (a bias may fall without limit).

    Args:
        scheme: a name, a config, or a built specimen.
        far: where the far end begins, in positions.

    Returns:
        `value` is the largest far logit over the largest near one; `None` if the scheme refuses all far positions.
    """
    specimen = build_specimen(scheme)
    contents = random_contents(4, 96)
    start, visible = torch.arange(48), specimen.visible(96)
    near = specimen.logits(positions_at(torch.cat((start, start + TRAINING_LENGTH - 48))), contents)[..., visible]
    largest_near = float(near.max())
    refused: list[str] = []
    by_position: dict[int, float] = {}
    finite = True
    for position in far:
        with collecting_refusals(refused, f"positions from {position}"):
            logits = specimen.logits(positions_at(torch.cat((start, start + position))), contents)[..., visible]
            finite = finite and bool(logits.isfinite().all())
            by_position[position] = float(logits.max()) / largest_near
    if not by_position:
        return Measurement(False, None, BOUNDED_UP_TO, {}, tuple(refused))
    value = max(by_position.values())
    passed = finite and not refused and value <= BOUNDED_UP_TO
    return Measurement(passed, value, BOUNDED_UP_TO, {"by_position": by_position, "finite": finite}, tuple(refused))
