"""Series of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .input_context import Context


def _length(context: Context) -> int:
    lags = context.value("lags_sequence")
    length = int(context.value("context_length", 64))
    return length + max(lags) if lags else length


def past_values(context: Context) -> Tensor:
    """(batch, steps), or (batch, steps, channels)."""
    channels = context.value("num_input_channels")
    shape = (context.batch, _length(context))
    return context.normal(*shape) if channels is None else context.normal(*shape, int(channels))


def _future(context: Context, *rest: int) -> Tensor | None:
    steps = context.value("prediction_length")
    if not context.value("is_encoder_decoder", False) or steps is None:
        return None
    return context.normal(context.batch, int(steps), *rest)


def _time_features(context: Context) -> int:
    return int(context.value("num_time_features", 0))


RULES: dict[str, Callable[[Context], Any]] = {
    "past_values": past_values,
    "past_time_features": lambda context: context.normal(context.batch, _length(context), _time_features(context)),
    "past_observed_mask": lambda context: torch.ones_like(context.given["past_values"]),
    "future_values": lambda context: _future(context),
    "future_time_features": lambda context: _future(context, _time_features(context)),
    "past_values_padding": lambda context: torch.zeros_like(context.given["past_values"]),
    "freq": lambda context: torch.zeros(context.batch, 1, dtype=torch.int64),
}
