"""Native mechanisms that a declaration disables: what is left of the model can be loaded, moved and cast."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import patch_model, unpatch_model
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.matrix.running import distance, tokens
from tests.models import tiny
from tests.versions import since


def test_a_silenced_buffer_is_filled_when_a_model_is_loaded(tmp_path: Path) -> None:
    model = tiny_model(pair_named("audio-text-canary"))
    before = dict(model.named_buffers())
    patch_model(model, "alibi").save_pretrained(tmp_path)
    loaded = unpatch_model(type(model).from_pretrained(tmp_path))
    assert all(torch.equal(buffer, before[name]) for name, buffer in loaded.named_buffers())


def layoutlm(layers: int, **options: Any) -> Any:
    torch.manual_seed(0)
    places = {"hidden_size": 48, "coordinate_size": 8, "shape_size": 8, "visual_embed": False}
    return tiny("LayoutLMv3Model", num_hidden_layers=layers, **places, **options).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_a_silenced_bias_has_the_dtype_of_the_model(attention: str) -> None:
    if attention == "sdpa":
        since("5.24", "LayoutLMv3 has eager attention only")
    model = layoutlm(1, has_spatial_attention_bias=False, attn_implementation=attention).bfloat16()
    found = patch_model(model, "none")(tokens(1, 8), bbox=torch.ones(1, 8, 4, dtype=torch.long))
    assert found.last_hidden_state.dtype == torch.bfloat16


@torch.no_grad()
def test_the_bias_of_boxes_stays_where_that_of_tokens_is_replaced() -> None:
    stock = layoutlm(2)
    for bias in (stock.encoder.rel_pos_bias, stock.encoder.rel_pos_x_bias, stock.encoder.rel_pos_y_bias):
        bias.weight.normal_()
    stock.embeddings.position_embeddings.weight.normal_()
    ids, boxes = tokens(1, 8), torch.arange(32).view(1, 8, 4) * torch.tensor([1, 1, 2, 3])
    found = patch_model(copy.deepcopy(stock), "none")(ids, bbox=boxes).last_hidden_state

    def expected() -> torch.Tensor:
        return stock(ids, bbox=boxes).last_hidden_state

    assert distance(found, expected()) > 1e-2
    stock.encoder.rel_pos_bias.weight.zero_()
    stock.embeddings.position_embeddings.weight.zero_()
    assert distance(found, expected()) <= 1e-5
    stock.encoder.rel_pos_x_bias.weight.zero_()
    assert distance(found, expected()) > 1e-4
