"""Runs a model as each behaviour requires."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from hf_posenc import patch_model
from tests.devices.spreading import spread
from tests.models import VOCABULARY

from .architectures import ARCHITECTURES

LENGTH = 14


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    """Random ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (batch, length), generator=generator)


def patched(name: str, scheme: Any, **overrides: Any) -> Any:
    """A fresh model of one row, patched; `None` leaves it stock."""
    model = ARCHITECTURES[name].build(**overrides)
    return spread(model if scheme is None else placed(model, scheme))


def placed(model: Any, scheme: Any, **options: Any) -> Any:
    """The model with a scheme, whose parameters are drawn from the same seed in each call."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        torch.manual_seed(7)
        patch_model(model, scheme, **options)
    strengthen(model)
    return model


def strengthen(model: Any) -> None:
    """Makes freshly drawn tables large enough to see."""
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            if parameter.dim() == 2 and parameter.std() < 0.1:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(3))


def drawn(model: Any, std: float = 1.0) -> Any:
    """The model, with random numbers for everything that its scheme learns."""
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.normal_(std=std)
    return model


def freshly_compiled(called: Any, backend: str = "eager", **options: Any) -> Any:
    """A model or a function, compiled by a torch that has nothing compiled yet."""
    torch._dynamo.reset()
    return torch.compile(called, backend=backend, **options)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Those of a loss alone, by the names of the parameters that have one."""
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def outputs(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits, or hidden states of a model without a head: `(batch, length, width)`."""
    if model.config.is_encoder_decoder:
        kwargs = {"decoder_input_ids": input_ids} | kwargs
    result = model(input_ids=input_ids, **kwargs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def distance(first: Tensor, second: Tensor) -> float:
    """Largest difference, relative to the size of the outputs."""
    return float((first - second).abs().max() / second.abs().max().clamp(min=1.0))
