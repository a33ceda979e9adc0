"""Declarations for the architectures in transformers that read images, sound or time series."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.patching.anatomy.architectures.declaration import (
    FRAMES,
    SAMPLES,
    SIDE,
    Architecture,
    codes,
    cut_patches,
    image_sides,
    no_native,
    no_vectors,
    numbers,
    refused_if,
    words,
    zero_bias,
    zero_vectors,
)
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.schemes import NoneConfig
from hf_posenc.schemes.refusals import POOLED_PATCHES

if TYPE_CHECKING:
    from hf_posenc.patching.place.record import Journal

_DETECTS = (
    "its layers add position vectors to queries and keys themselves, and attend to feature maps of several sizes. "
    "Patch the backbone before it is put into the detector, if that is a vision transformer."
)
_DETECTORS = (
    "conditional_detr", "d_fine", "dab-detr", "deformable_detr", "deimv2", "detr", "edgetam", "grounding-dino",
    "lw_detr", "mask2former", "maskformer", "mm-grounding-dino", "omdet-turbo", "oneformer", "pp_doclayout_v2",
    "pp_doclayout_v3", "pp_doclayout_v4", "rf_detr", "rt_detr", "rt_detr_v2", "table-transformer",
)  # fmt: skip
_OWN_COORDINATES = (
    "its patches come with (x, y) coordinates in an argument of their own, and each axis is rotated by a separate "
    "call. Patch another part."
)
_KEYPOINTS = "its tokens are keypoints at real coordinates, which it rotates by, not patches with rows and columns."
_NUMBERED_PATCHES = (
    "its patches come with their rows and columns as the first two of their values, and it looks up a vector for each. "
    "Patch the text part."
)
_TILES = (
    "its patches are those of several tiles, whose places in the picture only `aspect_ratio_ids` tells. Patch the text "
    "part."
)
_LATENTS = (
    "its latents have no positions, and one softmax is taken over them and the features of a picture together. Patch "
    "another part."
)
_MASKED_DECODER = (
    r"^decoder\.",
    "it receives the visible patches first and the masked ones after them, in an order that its arguments do not show",
)
_PREDICTOR = (
    r"^predictor\.",
    "it receives patches of the context and of the targets, in an order that its arguments do not show",
)
_WINDOW_MERGER = (r"^vit_merger\.", "it compares the four patches of a window, which have their own order")


def _image_and_prompt(module: Any, tokens: int) -> dict[str, Any]:
    """An image, another one, and the segmentation of the latter."""
    height, width = image_sides(module.config)
    # The image size in the config covers both images, one above the other.
    image = numbers(1, module.config.num_channels, height // 2, width)
    return {"pixel_values": image, "prompt_pixel_values": image.flip(3), "prompt_masks": image.flip(2)}


def _patch_images(module: Any, tokens: int) -> dict[str, Any]:
    """The pixels of every patch, as a separate image."""
    size = module.config.patch_size
    return cut_patches(SIDE**2, 3, *((size, size) if isinstance(size, int) else size))


#: The declarations by the model types that they are for.
PIXELS: dict[tuple[str, ...], Architecture] = {
    _DETECTORS: Architecture(unsupported=_DETECTS),
    ("lightglue", "superglue", "efficientloftr"): Architecture(unsupported=_KEYPOINTS),
    ("sam3_detr_encoder", "sam3_detr_decoder", "sam3_lite_text_detr_encoder", "sam3_lite_text_detr_decoder"): (
        Architecture(unsupported=_DETECTS)
    ),
    ("gemma4_vision",): Architecture(unsupported=_OWN_COORDINATES),
    ("pix2struct_vision_model", "kosmos_2_5_vision_model"): Architecture(unsupported=_NUMBERED_PATCHES),
    ("mllama_vision_model",): Architecture(unsupported=_TILES),
    ("idefics2_perceiver",): Architecture(unsupported=_LATENTS),
    ("molmo2_adapter",): Architecture(
        unsupported="it pools the patches of a window into one token, which is the only query."
    ),
    ("llama4_vision_model",): Architecture(suffix_tokens=1),
    ("yolos",): Architecture(suffix_tokens=lambda config: int(config.num_detection_tokens)),
    ("videomae",): Architecture(left_alone=_MASKED_DECODER),
    ("vjepa2",): Architecture(left_alone=_PREDICTOR),
    ("hiera", "sam2_hiera_det_model"): Architecture(limits=POOLED_PATCHES),
    ("minicpmv4_6_vision", "minicpmv4_7_vision", "minicpm_ocr_vision"): Architecture(
        left_alone=_WINDOW_MERGER,
        # All patches side by side in one strip.
        example_inputs=lambda module, tokens: {
            "pixel_values": numbers(
                1, module.config.num_channels, module.config.patch_size, module.config.patch_size * SIDE**2
            ),
            "target_sizes": torch.tensor([[SIDE, SIDE]]),
        },
    ),
    ("seggpt",): Architecture(example_inputs=_image_and_prompt),
    # Frames instead of a batch of images.
    ("xclip_vision_model",): Architecture(
        example_inputs=lambda module, tokens: {
            "pixel_values": numbers(module.config.num_frames, module.config.num_channels, *image_sides(module.config))
        }
    ),
    ("videomt",): Architecture(
        example_inputs=lambda module, tokens: {
            "pixel_values_videos": numbers(1, 2, module.config.num_channels, *image_sides(module.config))
        }
    ),
    ("kimi_k25_vision",): Architecture(example_inputs=_patch_images),
    # Patches of a batch.
    ("paddleocr_vl_vision",): Architecture(
        example_inputs=lambda module, tokens: cut_patches(
            1, SIDE**2, module.config.num_channels, module.config.patch_size, module.config.patch_size
        )
    ),
    # The pixels of every patch and of its frames in one row.
    ("muse_glimmer_vision", "muse_spark_vision"): Architecture(
        example_inputs=lambda module, tokens: cut_patches(
            SIDE**2, module.config.patch_temporal * 3 * module.config.patch_size**2
        )
    ),
    # The patches of a crop, cut out and flattened.
    ("molmo2_vision",): Architecture(
        example_inputs=lambda module, tokens: {
            "pixel_values": numbers(
                1, module.config.num_position_embeddings, module.config.num_channels * module.config.patch_size**2
            )
        }
    ),
    # Two by two patches in one, counted in such groups.
    ("inkling2_vision",): Architecture(
        example_inputs=lambda module, tokens: {
            "pixel_values": numbers(
                SIDE**2, *[module.config.patch_size * module.config.spatial_merge_size] * 2, module.config.num_channels
            ),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]),
        }
    ),
    ("bridgetower_vision_model",): Architecture(
        example_inputs=lambda module, tokens: {"image": numbers(1, 3, *image_sides(module.config))}
    ),
    # The features of another encoder on a grid.
    ("unlimited_ocr_vision_encoder",): Architecture(
        example_inputs=lambda module, tokens: {
            "patch_embeds": numbers(
                1, module.config.hidden_size, *[module.config.image_size // module.config.patch_size] * 2
            )
        }
    ),
    # Features of patches, without the queries that follow them.
    ("deepseek_ocr2_encoder",): Architecture(
        example_inputs=lambda module, tokens: {
            "inputs_embeds": numbers(1, tokens, module.config.hidden_size),
            "num_patches": tokens,
        }
    ),
}


def plain_heads(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Stands in for WavLM's call of torch's attention, which adds the gated `bias` where no scheme can act.

    Args:
        module: the attention module.
        hidden_states: `(batch, length, hidden)`.
        attention_mask: `(batch, length)`, 1 at real tokens.
        bias: the gated bias, which is not added.

    Returns:
        `(batch, length, hidden)` and the weights `(batch, heads, length, length)`.
    """
    query, key, value = (
        projection(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    scores = torch.matmul(query * module.scaling, key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask.ne(1)[:, None, None], torch.finfo(scores.dtype).min)
    weights = torch.nn.functional.softmax(scores, dim=-1)
    dropped = torch.nn.functional.dropout(weights, p=module.dropout, training=module.training)
    attended = torch.matmul(dropped, value).transpose(1, 2).flatten(2)
    return module.out_proj(attended), weights


def no_head_bias(module: Any, query_length: int, key_length: int) -> Tensor:
    """Stands in for WavLM's `compute_bias`: zeros `(heads, query_len, key_len)`."""
    return module.rel_attn_embed.weight.new_zeros(()).expand(module.num_heads, query_length, key_length)


def _silence_wavlm(stack: Stack, patches: Journal) -> None:
    for attention in stack.attentions:
        module = attention.module
        patches.replace(module, "torch_multi_head_self_attention", functools.partial(plain_heads, module))
        patches.freeze(module, "gru_rel_pos_const")
        patches.freeze_all(module.gru_rel_pos_linear)
        if hasattr(module, "rel_attn_embed"):
            patches.replace(module, "compute_bias", functools.partial(no_head_bias, module))
            patches.freeze_all(module.rel_attn_embed)


def _silence_vits(stack: Stack, patches: Journal) -> None:
    for attention in stack.attentions:
        if attention.module.window_size:
            patches.replace(attention.module, "window_size", None)
            patches.freeze(attention.module, "emb_rel_k")
            patches.freeze(attention.module, "emb_rel_v")


def _silence_phi4(stack: Stack, patches: Journal) -> None:
    layer = stack.module.relative_attention_bias_layer
    patches.set_forward(layer, zero_bias)
    patches.freeze_all(layer.bias_values)


def _codes_of_streams(tokens: int, streams: int) -> dict[str, Any]:
    return {"input_ids": codes(tokens, streams), "use_cache": False}


#: The declarations by the model types that they are for.
SOUND: dict[tuple[str, ...], Architecture] = {
    ("gemma3n_audio", "gemma4_audio"): Architecture(
        unsupported="its attention compares each block of frames with the frames around it, in tensors that do not "
        "show which keys belong to which query."
    ),
    ("patchtsmixer",): Architecture(
        unsupported="it mixes patches with layers of a fixed length, and has no softmax attention over time."
    ),
    ("granite_speech_encoder", "granite_speech_plus_encoder", "granite_speech5_encoder"): Architecture(
        unsupported="its attention compares frames within blocks, in tensors that hold each block as a sequence of its "
        "own."
    ),
    ("autoformer",): Architecture(unsupported="it correlates a series with itself in place of softmax attention."),
    ("clap_audio_model",): Architecture(
        unsupported="its attention compares patches of a spectrogram within shifted windows (Swin), whose order is not "
        "that of time."
    ),
    ("decision_transformer",): Architecture(
        unsupported="it gives all tokens position 0, and adds embeddings of time steps that the caller passes."
    ),
    ("speecht5",): Architecture(
        unsupported="its prenets, which add positions, are modules outside of its encoder and decoder, and "
        "generate_speech calls them separately."
    ),
    ("informer",): Architecture(
        unsupported=refused_if(
            lambda config: config.attention_type == "prob",
            "its ProbSparse attention computes logits for a sample of the queries only. It can be patched with "
            "attention_type='full'.",
        )
    ),
    ("semantic", "coarse_acoustics", "fine_acoustics"): Architecture(tables=("position_embeds_layer",)),
    ("vits",): Architecture(
        mechanism="relative keys and values",
        silence=_silence_vits,
        native=no_native(
            "VITS adds learned vectors per distance to its keys and to its values. No scheme of this library changes "
            "values.",
            "both",
        ),
    ),
    ("phi4_multimodal_audio",): Architecture(
        mechanism="relative bias",
        silence=_silence_phi4,
        native=no_native(
            "The audio encoder of Phi-4 adds a learned bias per distance and head, with one table for all layers. The "
            "schemes of this library group distances, or compute the bias from the query."
        ),
    ),
    ("fun_asr_nano_encoder",): Architecture(
        mechanism="sinusoids of positions",
        silence=lambda stack, patches: patches.replace(stack.module.position_embeddings, "forward", no_vectors),
        native=no_native(
            "Fun-ASR-Nano adds sinusoids that count frames from 1. No scheme of this library has that origin.", "them"
        ),
    ),
    ("canary_decoder",): Architecture(
        mechanism="sinusoidal table",
        silence=lambda stack, patches: patches.replace(stack.module.pos_emb, "forward", zero_vectors),
        native=no_native(
            "Canary's decoder adds sinusoids divided by the root of their width, and then normalises the sum. No "
            "scheme of this library has that scale.",
            "them",
        ),
    ),
    ("patchtst",): Architecture(
        unsupported=refused_if(
            lambda config: config.channel_attention,
            "with `channel_attention=True` the same attention module compares time steps and then channels, which "
            "have no order. It can be patched with channel_attention=False.",
        )
    ),
    ("wavlm",): Architecture(
        mechanism="gated relative bias",
        attention_classes=("WavLMAttention",),
        silence=_silence_wavlm,
        native=no_native(
            "WavLM multiplies a relative bias with a gate that each token computes from its input, and computes "
            "further positions with a convolution over neighbouring embeddings. No scheme of this library does this.",
            "both",
        ),
    ),
    ("qwen3_asr_encoder",): Architecture(
        unsupported="its sinusoids start again in every window, and all windows are packed in one row, so its layers "
        "are not told the place of a frame. Patch the text part."
    ),
    ("wavtokenizer",): Architecture(
        unsupported="its only attention layer, of one head, stands between convolutions, which show it the order of "
        "its input."
    ),
    ("csm",): Architecture(
        example_inputs=lambda module, tokens: _codes_of_streams(tokens, module.config.num_codebooks)
    ),
    # A word precedes the codes.
    ("kyutai_speech_to_text",): Architecture(
        example_inputs=lambda module, tokens: _codes_of_streams(tokens, module.config.num_codebooks + 1)
    ),
    # A text for the encoder, and one code of each channel for the decoder.
    ("dia",): Architecture(
        example_inputs=lambda module, tokens: {
            "input_ids": words(tokens),
            "decoder_input_ids": codes(tokens, module.config.decoder_config.num_channels),
            "use_cache": False,
        }
    ),
    # An embedding of the delay of the transcript.
    ("voxtral_realtime_text",): Architecture(
        example_inputs=lambda module, tokens: {
            "input_ids": words(tokens),
            "t_cond": numbers(1, module.config.hidden_size),
            "use_cache": False,
        }
    ),
    ("pe_audio_encoder", "omniasr_audio"): Architecture(
        example_inputs=lambda module, tokens: {"input_values": numbers(1, 1, SAMPLES)}
    ),
    ("voxtral_realtime_encoder",): Architecture(
        example_inputs=lambda module, tokens: {"input_features": numbers(1, module.config.num_mel_bins, FRAMES)}
    ),
    # Phases depend on the index of the head, so queries and keys of a head are rotated alike. The inputs are the wave
    # and its spectrogram.
    ("neucodec", "xcodec2"): Architecture(
        native=lambda stack: NoneConfig(),
        example_inputs=lambda module, tokens: {
            "input_values": numbers(1, 1, SAMPLES),
            "input_features": numbers(
                1, SAMPLES // 320, module.config.semantic_model_config.feature_projection_input_dim
            ),
        },
    ),
}
