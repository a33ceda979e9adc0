"""Does the same token at the same position always get the same encoding?"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hf_posenc.metrics.preserve import isolated_rng
from hf_posenc.metrics.properties.measurement import Measurement
from hf_posenc.metrics.properties.specimen import (
    SEED,
    Specimen,
    build_parts,
    build_specimen,
    positions_at,
    random_contents,
)
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.positions import Positions

#: Two evaluations and two builds agree to the last bit. In a batch of another shape matrix products may round
#: differently, by a few units in the last place of logits up to about 10.
SAME_UP_TO = 1e-5


@torch.no_grad()
def determinism(scheme: str | SchemeConfig | Specimen) -> Measurement:
    """The largest difference between logits that have to be the same.

    Compared are two evaluations under different random states, two builds under different random states of which the
    second takes over the weights of the first, and a sequence by itself and in a batch with a longer one (padding
    before it and after it). Passes up to 1e-5, relative to the largest logit where that is more than 1.

    Args:
        scheme: a name, a config, or a built specimen.

    Returns:
        `value` is the largest difference; `details` has it for evaluations, builds and batches.
    """
    specimen = build_specimen(scheme)
    ids, contents = torch.arange(48), random_contents(1, 48)
    visible = specimen.visible(48)

    def evaluate(subject: Specimen, seed: int) -> Tensor:
        with isolated_rng(seed):
            return subject.logits(positions_at(ids), contents)[..., visible]

    first = evaluate(specimen, 1)
    size = float(first.abs().max().clamp(min=1))
    details = {
        "evaluations": float((evaluate(specimen, 2) - first).abs().max()) / size,
        "builds": float((evaluate(_rebuilt(specimen), 1) - first).abs().max()) / size,
        "batches": max(float((row[..., visible] - first).abs().max()) for row in _in_batches(specimen, contents))
        / size,
    }
    value = max(details.values())
    return Measurement(value <= SAME_UP_TO, value, SAME_UP_TO, dict(details))


def _rebuilt(specimen: Specimen) -> Specimen:
    """The same scheme, built under another random state, with the weights of the first."""
    parts = build_parts(specimen.config, specimen.context, SEED + 1000)
    for new, old in zip(parts, specimen.parts, strict=True):
        new.load_state_dict(old.state_dict())
    return dataclasses.replace(specimen, parts=parts)


def _in_batches(specimen: Specimen, contents: Tensor) -> list[Tensor]:
    """The logits of a sequence of 48 beside one of 64, padded on the left and on the right."""
    results = []
    other, padding = random_contents(1, 64, seed=SEED + 1), torch.full((16,), -1)
    for left in (True, False):
        pieces = [padding, torch.arange(48)] if left else [torch.arange(48), padding]
        ids = torch.stack((torch.cat(pieces), torch.arange(64)))
        filler = torch.zeros(1, 16, contents.shape[-1])
        row = torch.cat((filler, contents) if left else (contents, filler), dim=1)
        token_ids = torch.arange(48) * 7 % 11
        shown = torch.cat((padding.clamp(min=0), token_ids) if left else (token_ids, padding.clamp(min=0)))
        positions = Positions(
            ids, torch.tensor([[48], [64]]), token_ids=torch.stack((shown, torch.arange(64) * 7 % 11))
        )
        logits = specimen.logits(positions, torch.cat((row, other)))
        inside = slice(16, 64) if left else slice(0, 48)
        results.append(logits[:1, :, inside, inside])
    return results
