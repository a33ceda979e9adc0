"""A tiny Whisper, and what gives its weights an effect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "vocab_size": 40,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_target_positions": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def normal(*shape: int) -> Tensor:
    """Fixed random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def stir(model: nn.Module) -> None:
    """Gives all weights an effect: constants become random, and attention is not uniform."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name and not parameter.requires_grad and parameter.std() < 0.1:
                parameter.normal_()
            elif parameter.requires_grad and parameter.dim() and (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.requires_grad and parameter.dim() == 2 and "embed" not in name:
                parameter.normal_(std=1.2 / parameter.shape[1] ** 0.5)


@torch.no_grad()
def output(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The first output of a model; sequences of tokens of any model have this."""
    found: Tensor = model(**{name: value.clone() for name, value in given.items()})[0]
    return found
