"""Tokens, with placeholders for as many features as the model computes from the other inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .input_context import Context

BEFORE, AFTER = 4, 8
#: Names of the config fields with the placeholder of a modality, and of the methods that compute its features.
_PLACEHOLDERS = {
    "image": (
        ("pixel_values", "image_patches"),
        ("image_token_id", "image_token_index", "im_patch_id", "media_placeholder_token_id"),
        "get_image_features",
    ),
    "video": (("pixel_values_videos",), ("video_token_id", "video_token_index"), "get_video_features"),
    "audio": (
        ("input_features", "input_values"),
        ("audio_token_id", "audio_token_index", "sound_token_id"),
        "get_audio_features",
    ),
}
_AROUND = {
    "image": (
        ("vision_start_token_id", "image_start_token_id", "boi_token_id"),
        ("vision_end_token_id", "image_end_token_id", "eoi_token_id"),
    ),
    "video": (("vision_start_token_id",), ("vision_end_token_id",)),
    "audio": (("audio_bos_token_id",), ("audio_eos_token_id",)),
}


def input_ids(context: Context) -> Tensor:
    """(batch, tokens): text, the placeholders of what was given, text."""
    pieces = [context.tokens(BEFORE)]
    for modality, (arguments, names, getter) in _PLACEHOLDERS.items():
        token = context.first(*names)
        if token is None or not any(name in context.given for name in arguments):
            continue
        count = _count(context, getter)
        if count:
            start, end = (context.first(*one) for one in _AROUND[modality])
            span = [start] * (start is not None) + [token] * count + [end] * (end is not None)
            pieces.append(torch.tensor([span] * context.batch))
    pieces.append(context.tokens(AFTER))
    return torch.cat(pieces, dim=1)


def with_placeholders(context: Context, token: int, count: int) -> Tensor:
    """(batch, tokens): text around so many placeholders."""
    span = torch.full((context.batch, count), token)
    return torch.cat((context.tokens(BEFORE), span, context.tokens(AFTER)), dim=1)


def _count(context: Context, getter: str) -> int:
    """How many rows of features the model computes for one sample."""
    owner = next((module for module in reversed(list(context.model.modules())) if hasattr(module, getter)), None)
    if owner is None:
        return 0
    with torch.no_grad():
        features = getattr(owner, getter)(**_arguments(context, getter, owner))
    return sum(one.numel() // one.shape[-1] for one in _feature_tensors(features)) // context.batch


def _arguments(context: Context, getter: str, owner: Any) -> dict[str, Any]:
    names = set(inspect.signature(getattr(owner, getter)).parameters)
    if names <= {"args", "kwargs"}:
        names |= set(context.given)
    return {name: value for name, value in context.given.items() if name in names}


def _feature_tensors(features: Any) -> list[Tensor]:
    if isinstance(features, Tensor):
        return [features]
    pooled = getattr(features, "pooler_output", None)
    if pooled is None and hasattr(features, "last_hidden_state"):
        pooled = features.last_hidden_state
    chosen = features if pooled is None else pooled
    if isinstance(chosen, Tensor):
        return [chosen]
    return [tensor for one in chosen if isinstance(one, Tensor | list | tuple) for tensor in _feature_tensors(one)]


def decoder_input_ids(context: Context) -> Tensor:
    """(batch, 12): what the decoder has so far."""
    return context.tokens(12)


def token_types(context: Context) -> Tensor | None:
    """1 at the placeholders of pictures, 2 of videos, 3 of sound, else 0."""
    tokens = context.given.get("input_ids")
    if tokens is None:
        return None
    types = torch.zeros_like(tokens)
    for value, (_, names, _) in enumerate(_PLACEHOLDERS.values(), start=1):
        token = context.first(*names)
        if token is not None:
            types[tokens == token] = value
    return types


def attention_mask(context: Context) -> Tensor | None:
    """All ones, where there are tokens."""
    tokens = context.given.get("input_ids")
    return None if tokens is None else torch.ones_like(tokens)


RULES: dict[str, Callable[[Context], Any]] = {
    "input_ids": input_ids,
    "attention_mask": attention_mask,
    "mm_token_type_ids": token_types,
    "decoder_input_ids": decoder_input_ids,
}
