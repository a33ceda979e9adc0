"""Do queries and keys keep their length?"""

from __future__ import annotations

import torch

from hf_posenc.metrics.properties.measurement import Measurement, does_not_apply, not_evaluated
from hf_posenc.metrics.properties.specimen import (
    TRAINING_LENGTH,
    Specimen,
    build_specimen,
    collecting_refusals,
    positions_at,
    random_contents,
)
from hf_posenc.schemes.config import SchemeConfig

#: A rotation in float32 rounds each of 64 components by 6e-8; their norm is off by less than 1e-6.
PRESERVED_UP_TO = 1e-5


@torch.no_grad()
def norm_preservation(scheme: str | SchemeConfig | Specimen) -> Measurement:
    """The largest relative change of the norm of a query or key, `max_p | |R_p x| / |x| - 1 |`.

    Over the positions of the training length and some far beyond it, for random queries and keys. Passes up to 1e-5.

    Args:
        scheme: a name, a config, or a built specimen.

    Returns:
        `value` is the change; `details["by_position"]` is how much of it depends on the position,
        `max_p | |R_p x| / |R_0 x| - 1 |`: zero for a rotation of vectors that were changed otherwise.
    """
    specimen = build_specimen(scheme)
    query_key_map = specimen.parts.query_key_map
    if query_key_map is None:
        return does_not_apply("the scheme does not map queries and keys")
    refused: list[str] = []
    changes, by_position = [], []
    windows = {"positions of the training length": torch.arange(TRAINING_LENGTH)}
    windows |= {f"position {far}": torch.tensor([0, far]) for far in (4 * TRAINING_LENGTH, 30000)}
    for name, ids in windows.items():
        with collecting_refusals(refused, name):
            heads = random_contents(8, specimen.context.num_heads).unsqueeze(2).expand(-1, -1, ids.shape[0], -1)
            phases = query_key_map.phases(positions_at(ids))
            for apply in (query_key_map.map_query, query_key_map.map_key):
                norms = apply(heads, phases).double().norm(dim=-1)
                changes.append(float((norms / heads.double().norm(dim=-1) - 1).abs().max()))
                by_position.append(float((norms / norms[..., :1] - 1).abs().max()))
    if not changes:
        return not_evaluated(refused)
    value = max(changes)
    details = {"by_position": max(by_position)}
    return Measurement(value <= PRESERVED_UP_TO, value, PRESERVED_UP_TO, details, tuple(refused))
