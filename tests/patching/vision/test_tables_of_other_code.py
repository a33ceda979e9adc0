"""A vision transformer of other code, whose method resizes the rows of patches, without that of the class token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_posenc import patch_model, unpatch_model

WIDTH, HEADS, SIDE = 32, 4, 4


class Config(PreTrainedConfig):
    model_type = "outside_vision"

    def __init__(self, **options: Any) -> None:
        self.hidden_size, self.num_attention_heads, self.image_size, self.patch_size = WIDTH, HEADS, 4 * SIDE, 4
        super().__init__(**options)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, WIDTH, 4, 4)
        self.class_embedding = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position_embedding = nn.Parameter(torch.randn(1, SIDE**2 + 1, WIDTH))

    def _get_pos_embed(self, table: Tensor, rows: int, columns: int) -> Tensor:
        table = table.view(1, SIDE, SIDE, WIDTH).permute(0, 3, 1, 2)
        table = nn.functional.interpolate(table, size=(rows, columns), mode="bicubic", align_corners=False)
        return table.flatten(2).transpose(1, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values)
        table = self._get_pos_embed(self.position_embedding[:, 1:], *patches.shape[2:])
        first = self.class_embedding.expand(len(patches), -1, -1)
        embedded = torch.cat((first, patches.flatten(2).transpose(1, 2)), 1)
        return embedded + torch.cat((self.position_embedding[:, :1], table), 1)


class OutsideAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv = HEADS, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        heads = self.qkv(hidden_states).view(*hidden_states.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = heads[0] @ heads[1].transpose(-2, -1) * (WIDTH // HEADS) ** -0.5
        return (scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(hidden_states.shape)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = OutsideAttention()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.attn(hidden_states)


class OutsideVisionModel(PreTrainedModel):
    config_class, main_input_name, input_modalities = Config, "pixel_values", "image"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embeddings, self.layers = Embeddings(), nn.ModuleList([Layer() for _ in range(2)])
        self.post_init()

    def forward(self, pixel_values: Tensor) -> BaseModelOutput:
        hidden_states = self.embeddings(pixel_values)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states)


@pytest.mark.parametrize("size", [(16, 16), (24, 16)])
@torch.no_grad()
def test_a_table_with_a_class_token_is_replaced(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = OutsideVisionModel(Config()).eval()
    pixels = torch.randn(2, 3, *size)
    stock = model(pixel_values=pixels).last_hidden_state
    patch_model(model, "native")
    assert model.position_encoding.config.name == "learned"
    torch.testing.assert_close(model(pixel_values=pixels).last_hidden_state, stock, rtol=0, atol=1e-5)
    patch_model(model, "sinusoidal")
    assert not torch.allclose(model(pixel_values=pixels).last_hidden_state, stock, atol=0.1)
    patch_model(model, "none")
    output = model(pixel_values=pixels).last_hidden_state
    # Two patches change places.
    other, order = pixels.clone(), [*range(output.shape[1])]
    other[..., :4, :4], other[..., 4:8, 8:12] = pixels[..., 4:8, 8:12], pixels[..., :4, :4]
    order[1], order[2 + SIDE + 1] = order[2 + SIDE + 1], order[1]
    torch.testing.assert_close(model(pixel_values=other).last_hidden_state, output[:, order], rtol=0, atol=1e-5)
    unpatch_model(model)
    assert torch.equal(model(pixel_values=pixels).last_hidden_state, stock)
