"""Faults that the sweep has found in parts of models, one of each class."""

from __future__ import annotations

import pytest
import torch

from hf_posenc import UnsupportedError, patch_model

from .calling import Caller
from .population import pair_named


@torch.no_grad()
def test_layers_of_rows_and_columns_have_the_same_places_in_every_call() -> None:
    """SAM 3 passes the places of patches as columns first, and its rotation is replaced from the second call on."""
    caller = Caller(pair_named("vision-sam3_vit_model"))
    patch_model(caller.model, "rope_nd", grid=(4,))
    first = caller.outputs()
    assert torch.equal(caller.outputs(), first)
    torch.testing.assert_close(caller.eager(), first, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_bias_is_refused_by_eager_attention_that_ignores_its_mask() -> None:
    caller = Caller(pair_named("video-vjepa2"))
    patch_model(caller.model, "alibi", axes=3)
    caller.outputs()
    with pytest.raises(UnsupportedError, match=r"ignores its mask.*sdpa"):
        caller.eager()


@torch.no_grad()
def test_vectors_are_added_before_the_first_layer_of_nested_lists() -> None:
    caller = Caller(pair_named("vision-glpn"))
    stock = caller.outputs()
    patch_model(caller.model, "sinusoidal", axes=2)
    assert not torch.equal(caller.outputs(), stock)
