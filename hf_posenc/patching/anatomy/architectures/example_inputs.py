"""Arguments for short runs of architectures that need more than tokens, pixels or features of the usual shape.

Every function here is the `example_inputs` of an `Architecture`. The numbers are fixed, so that the caller's random
generator is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Rows and columns of patches. All spatial merges divide it.
_SIDE = 4
#: Frames of a spectrogram and samples of a wave, enough for 16 tokens after the usual convolutions.
FRAMES = 128
SAMPLES = 6480


def numbers(*shape: int) -> Tensor:
    """Normally distributed numbers, the same in every call."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _tokens(count: int) -> Tensor:
    return torch.arange(5, 5 + count).unsqueeze(0)


def _codes(tokens: int, streams: int) -> Tensor:
    """`(1, tokens, streams)`: a code of each stream for every token."""
    return (torch.arange(tokens).unsqueeze(1) + torch.arange(streams)).unsqueeze(0) % 16


def _image_sides(config: Any) -> tuple[int, int]:
    """Height and width of an image in pixels."""
    size = config.image_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _grid_of_patches() -> Tensor:
    """`(1, 3)`: frames, rows and columns of one image."""
    return torch.tensor([[1, _SIDE, _SIDE]])


# Text


def tokens_of_codebooks(module: Any, tokens: int) -> dict[str, Any]:
    """CSM: a token is one code of each codebook."""
    return {"input_ids": _codes(tokens, module.config.num_codebooks), "use_cache": False}


def tokens_of_codebooks_and_a_word(module: Any, tokens: int) -> dict[str, Any]:
    """Kyutai's speech to text: a word stands before the codes."""
    return {"input_ids": _codes(tokens, module.config.num_codebooks + 1), "use_cache": False}


def text_and_channels(module: Any, tokens: int) -> dict[str, Any]:
    """Dia: text for the encoder, and one code of each channel for the decoder."""
    codes = _codes(tokens, module.config.decoder_config.num_channels)
    return {"input_ids": _tokens(tokens), "decoder_input_ids": codes, "use_cache": False}


def tokens_at_a_time(module: Any, tokens: int) -> dict[str, Any]:
    """The text model of Voxtral Realtime: an embedding of the delay of the transcript."""
    return {"input_ids": _tokens(tokens), "t_cond": numbers(1, module.config.hidden_size), "use_cache": False}


def tokens_about_an_image(module: Any, tokens: int) -> dict[str, Any]:
    """Idefics: text with cross-attention to the features of one image."""
    width = module.config.vision_config.embed_dim
    return {
        "input_ids": _tokens(tokens),
        "image_encoder_embeddings": numbers(1, 1, _SIDE, width),
        "image_attention_mask": torch.ones(1, tokens, 1, dtype=torch.int64),
        "use_cache": False,
    }


def a_question(module: Any, tokens: int) -> dict[str, Any]:
    """JEV: a prompt with one question and two options."""
    return {
        "input_ids": _tokens(tokens),
        "marks": torch.tensor([[tokens]]),
        "num_options": torch.tensor([[2]]),
        "question_type_ids": torch.tensor([[0]]),
    }


# Images


def image_and_prompt(module: Any, tokens: int) -> dict[str, Any]:
    """SegGPT: an image, another one, and the segmentation of the latter."""
    config = module.config
    height, width = _image_sides(config)
    # The image size of the config is that of both images, one above the other.
    image = numbers(1, config.num_channels, height // 2, width)
    return {"pixel_values": image, "prompt_pixel_values": image.flip(3), "prompt_masks": image.flip(2)}


def frames_of_a_video(module: Any, tokens: int) -> dict[str, Any]:
    """X-CLIP's vision model: frames in place of a batch of images."""
    config = module.config
    return {"pixel_values": numbers(config.num_frames, config.num_channels, *_image_sides(config))}


def short_video(module: Any, tokens: int) -> dict[str, Any]:
    """VidEoMT: two frames."""
    config = module.config
    return {"pixel_values_videos": numbers(1, 2, config.num_channels, *_image_sides(config))}


def cut_patches(module: Any, tokens: int) -> dict[str, Any]:
    """Kimi: the pixels of every patch, as an image of its own."""
    size = module.config.patch_size
    rows, columns = (size, size) if isinstance(size, int) else size
    return {"pixel_values": numbers(_SIDE * _SIDE, 3, rows, columns), "grid_thw": _grid_of_patches()}


def cut_patches_of_a_batch(module: Any, tokens: int) -> dict[str, Any]:
    """PaddleOCR-VL: as `cut_patches`, behind an axis for the batch."""
    config = module.config
    size = config.patch_size
    return {
        "pixel_values": numbers(1, _SIDE * _SIDE, config.num_channels, size, size),
        "grid_thw": _grid_of_patches(),
    }


def flat_patches(module: Any, tokens: int) -> dict[str, Any]:
    """Muse: the pixels of every patch and of its frames in one row."""
    config = module.config
    values = config.patch_temporal * 3 * config.patch_size**2
    return {"pixel_values": numbers(_SIDE * _SIDE, values), "grid_thw": _grid_of_patches()}


def patches_in_a_row(module: Any, tokens: int) -> dict[str, Any]:
    """MiniCPM-V and MiniCPM-OCR: all patches side by side in one strip."""
    config = module.config
    return {
        "pixel_values": numbers(1, config.num_channels, config.patch_size, config.patch_size * _SIDE * _SIDE),
        "target_sizes": torch.tensor([[_SIDE, _SIDE]]),
    }


# Sound


def wave_with_a_channel(module: Any, tokens: int) -> dict[str, Any]:
    """PE Audio: `(batch, channels, samples)`."""
    return {"input_values": numbers(1, 1, SAMPLES)}


def spectrogram_with_bins_first(module: Any, tokens: int) -> dict[str, Any]:
    """Voxtral Realtime: `(batch, bins, frames)`."""
    return {"input_features": numbers(1, module.config.num_mel_bins, FRAMES)}
