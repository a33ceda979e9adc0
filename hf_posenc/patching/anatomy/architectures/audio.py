"""Declarations for architectures that read sound or time series."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.patching.anatomy.architectures.declaration import Architecture, refused_if, undescribed
from hf_posenc.patching.anatomy.architectures.example_inputs import FRAMES, SAMPLES, codes, numbers, words
from hf_posenc.patching.anatomy.architectures.silencers import no_vectors, zero_bias, zero_vectors
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.schemes import NoneConfig

if TYPE_CHECKING:
    from hf_posenc.patching.place.journal import Journal


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


def _silence_canary(stack: Stack, patches: Journal) -> None:
    patches.replace(stack.module.pos_emb, "forward", zero_vectors)


def _silence_fun_asr(stack: Stack, patches: Journal) -> None:
    patches.replace(stack.module.position_embeddings, "forward", no_vectors)


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


#: The declarations by the model types that they are for.
AUDIO: dict[tuple[str, ...], Architecture] = {
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
        native=undescribed(
            "VITS adds learned vectors per distance to its keys and to its values. No scheme of this library changes "
            "values. Any scheme can replace both, and unpatch_model restores them."
        ),
    ),
    ("phi4_multimodal_audio",): Architecture(
        mechanism="relative bias",
        silence=_silence_phi4,
        native=undescribed(
            "The audio encoder of Phi-4 adds a learned bias per distance and head, with one table for all layers. The "
            "schemes of this library group distances, or compute the bias from the query. Any scheme can replace it, "
            "and unpatch_model restores it."
        ),
    ),
    ("fun_asr_nano_encoder",): Architecture(
        mechanism="sinusoids of positions",
        silence=_silence_fun_asr,
        native=undescribed(
            "Fun-ASR-Nano adds sinusoids that count frames from 1. No scheme of this library has that origin. Any "
            "scheme can replace them, and unpatch_model restores them."
        ),
    ),
    ("canary_decoder",): Architecture(
        mechanism="sinusoidal table",
        silence=_silence_canary,
        native=undescribed(
            "Canary's decoder adds sinusoids divided by the root of their width, and then normalises the sum. No "
            "scheme of this library has that scale. Any scheme can replace them, and unpatch_model restores them."
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
        native=undescribed(
            "WavLM multiplies a relative bias with a gate that each token computes from its input, and computes "
            "further positions with a convolution over neighbouring embeddings. No scheme of this library does this. "
            "Any scheme can replace both, and unpatch_model restores them."
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
        example_inputs=lambda module, tokens: {
            "input_ids": codes(tokens, module.config.num_codebooks),
            "use_cache": False,
        }
    ),
    # A word stands before the codes.
    ("kyutai_speech_to_text",): Architecture(
        example_inputs=lambda module, tokens: {
            "input_ids": codes(tokens, module.config.num_codebooks + 1),
            "use_cache": False,
        }
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
    # Phases are those of the number of a head, so queries and keys of a head are rotated alike. The wave, and the
    # spectrogram of it.
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
