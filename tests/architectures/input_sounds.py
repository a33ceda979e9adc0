"""Sound: waves, spectrograms and their masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .input_context import Context

_AUDIO = ("audio_config", "speech_config", "encoder_config", "encoder", "audio_encoder", "asr_config")
FRAMES = (96, 64)
SAMPLES = (6400 + 80, 3200 + 80)


def _audio(context: Context) -> Any:
    return context.part(*_AUDIO)


def bins(context: Context) -> int:
    """The width of a spectrogram."""
    audio = _audio(context)
    names = ("num_mel_bins", "feature_size", "input_feat_size", "feature_projection_input_dim", "input_dim", "n_mels")
    own = next((getattr(audio, name) for name in names if isinstance(getattr(audio, name, None), int)), None)
    return int(own or context.first(*names) or 80) * int(getattr(audio, "num_stacked_frames", 1))


def input_features(context: Context) -> Tensor | None:
    """(batch, frames, bins), or (batch, bins, frames) where the encoder starts with a convolution over frames."""
    if "pixel_values" in context.given:
        return None
    audio = _audio(context)
    rows = getattr(audio, "max_source_positions", None)
    if _starts_with_convolution(context):
        return context.normal(context.batch, bins(context), FRAMES[0] if rows is None else 2 * int(rows))
    return context.normal(context.batch, FRAMES[context.size], bins(context))


def _starts_with_convolution(context: Context) -> bool:
    """Whether the first layer is a 1-D convolution whose channels are the bins, as in Whisper."""
    first = next((module for module in context.model.modules() if isinstance(module, torch.nn.Conv1d)), None)
    return first is not None and first.in_channels == bins(context)


def input_values(context: Context) -> Tensor | None:
    """(batch, samples), or (batch, 1, samples) where the model starts with a convolution over one channel."""
    if "pixel_values" in context.given:
        return None
    wave = context.normal(context.batch, SAMPLES[context.size])
    channels = context.first("audio_channels", "channels")
    return wave.unsqueeze(1) if channels is not None else wave


def ones_like_frames(context: Context) -> Tensor | None:
    """A mask of all frames."""
    features = context.given.get("input_features")
    if features is None:
        return None
    frames = features.shape[-1] if _starts_with_convolution(context) else features.shape[1]
    return torch.ones(context.batch, frames, dtype=torch.int64)


def wave_with_channel(context: Context) -> Tensor:
    """(batch, 1, samples)."""
    return context.normal(context.batch, 1, SAMPLES[context.size])


def spectrogram(context: Context) -> Tensor:
    """(batch, frames, bins), as many frames as the config says."""
    return context.normal(context.batch, int(context.first("max_length", "max_source_positions")), bins(context))


def frames_first(context: Context) -> Tensor:
    """(batch, frames, bins), whatever the first layer is."""
    return context.normal(context.batch, FRAMES[context.size], bins(context))


RULES: dict[str, Callable[[Context], Any]] = {
    "input_features": input_features,
    "audio_mel": lambda context: context.normal(context.batch, FRAMES[context.size], bins(context)),
    "audio_mel_mask": lambda context: torch.zeros(context.batch, FRAMES[context.size], dtype=torch.bool),
    "input_values": input_values,
    "input_features_mask": ones_like_frames,
    "feature_attention_mask": ones_like_frames,
}
