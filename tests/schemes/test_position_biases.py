"""Biases that read absolute positions, with every parameter away from its start."""

from __future__ import annotations

import pytest
import torch

from hf_posenc.schemes import AttentionPairs, BuildContext, Positions
from hf_posenc.schemes.bias.tupe import TupeConfig

from .table import TABLE, LogitCase

HEADS, HEAD_DIM, LENGTH = 3, 4, 7


@pytest.mark.parametrize("reset_first", [False, True])
def test_tupe_equals_its_reference_with_any_parameters(reset_first: bool) -> None:
    config = TupeConfig(num_positions=20, reset_first=reset_first)
    parts = config.build(BuildContext(8, HEADS, HEAD_DIM, causal=False))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parts.logit_bias.parameters():
            parameter.normal_(generator=generator)
    query, key = torch.randn(2, 1, HEADS, LENGTH, HEAD_DIM, generator=generator)
    ids = torch.tensor([[0, 1, 2, 5, 6, 11, 19]])
    pairs = AttentionPairs(query, key, torch.arange(LENGTH), Positions(ids, torch.tensor([[20]])), HEAD_DIM**-0.5)
    case = LogitCase(query[0].tolist(), key[0].tolist(), [[]] * LENGTH, ids[0].tolist(), HEAD_DIM**-0.5, causal=False)
    with torch.no_grad():
        logits = query @ key.transpose(-1, -2) * HEAD_DIM**-0.5 + parts.logit_bias(pairs)
        logits = logits * parts.logit_scale(pairs.keys).unsqueeze(-1)
    reference = TABLE[config.name].reference
    assert reference is not None
    torch.testing.assert_close(logits[0], torch.tensor(reference(config, parts, case)), rtol=1e-4, atol=1e-4)
