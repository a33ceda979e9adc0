"""A forward on the meta device, by which others count operations and plan memory: shapes without numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc import PositionEncodingError
from tests.matrix.running import VOCABULARY, patched
from tests.matrix.test_behaviour import SCHEMES
from tests.thinning import mostly_slow


@pytest.mark.parametrize("implementation", mostly_slow(["eager", "sdpa"], "sdpa".__eq__))
@pytest.mark.parametrize("architecture", mostly_slow(["llama_gqa", "bert"], "llama_gqa".__eq__))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_forward_and_its_gradients_have_the_right_shapes(scheme: str, architecture: str, implementation: str) -> None:
    try:
        model: Any = patched(architecture, SCHEMES[scheme], attn_implementation=implementation).to("meta")
    except (PositionEncodingError, ValueError) as refused:
        pytest.skip(str(refused)[:100])
    for length in (24, 160):  # The second one is too long for a bias as one matrix.
        ids = torch.randint(5, VOCABULARY, (2, length), device="meta")
        logits = model(input_ids=ids).logits
        assert logits.shape == (2, length, VOCABULARY)
        assert logits.is_meta
        logits.sum().backward()
    assert all(one.grad is None or one.grad.shape == one.shape for one in model.parameters())
