"""Tiny models whose outputs depend visibly on every weight."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc import SchemeConfig, patch_model
from tests.checkpoint.checkpoint_cases import randomize
from tests.models import tiny


def visible(name: str, scheme: str | SchemeConfig | None = None, **options: Any) -> PreTrainedModel:
    """A tiny model of a class, the same in every call.

    Args:
        name: of the class.
        scheme: what it is patched with; `None` for a stock model.
        **options: fields of its config.
    """
    torch.manual_seed(0)
    model = randomize(tiny(name, **options))
    if scheme is not None:
        patch_model(model, scheme)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "position_encoding" in key:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.eval()
    return model
