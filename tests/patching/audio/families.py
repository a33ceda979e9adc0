"""Tiny random models that read sound or time series, and an input for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_WAVE = _SMALL | {
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 5,
    "num_conv_pos_embedding_groups": 2,
}
_PATCHES = {
    "d_model": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "num_input_channels": 2,
    "context_length": 32,
    "patch_length": 4,
    "patch_stride": 4,
}
_LIKE_WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 12,
}
WHISPER = _LIKE_WHISPER | {
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
_PARAKEET = _SMALL | {"num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 3}


def normal(*shape: int) -> Tensor:
    """Fixed random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def wave() -> dict[str, Tensor]:
    """One wave of 200 samples."""
    return {"input_values": normal(1, 200)}


def frames(bins: int = 16) -> dict[str, Tensor]:
    """One spectrogram of 40 frames."""
    return {"input_features": normal(1, 40, bins)}


def mel() -> dict[str, Tensor]:
    """One spectrogram of 24 frames, bins first."""
    return {"input_features": normal(1, 8, 24)}


#: Class of the model, its config, and its input.
FAMILIES: dict[str, tuple[str, Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "wav2vec2": ("Wav2Vec2Model", lambda: hf.Wav2Vec2Config(**_WAVE), wave),
    "wav2vec2 stable": (
        "Wav2Vec2Model",
        lambda: hf.Wav2Vec2Config(**_WAVE, do_stable_layer_norm=True, feat_extract_norm="layer"),
        wave,
    ),
    "hubert": ("HubertModel", lambda: hf.HubertConfig(**_WAVE), wave),
    "wavlm": ("WavLMModel", lambda: hf.WavLMConfig(**_WAVE), wave),
    "unispeech": ("UniSpeechModel", lambda: hf.UniSpeechConfig(**_WAVE), wave),
    "unispeech-sat": ("UniSpeechSatModel", lambda: hf.UniSpeechSatConfig(**_WAVE), wave),
    "sew": ("SEWModel", lambda: hf.SEWConfig(**_WAVE), wave),
    "sew-d": ("SEWDModel", lambda: hf.SEWDConfig(**_WAVE), wave),
    "data2vec-audio": (
        "Data2VecAudioModel",
        lambda: hf.Data2VecAudioConfig(**_WAVE | {"num_conv_pos_embeddings": 2}),
        wave,
    ),
    "conformer": (
        "Wav2Vec2ConformerModel",
        lambda: hf.Wav2Vec2ConformerConfig(**_WAVE, conv_depthwise_kernel_size=3),
        wave,
    ),
    "conformer rotary": (
        "Wav2Vec2ConformerModel",
        lambda: hf.Wav2Vec2ConformerConfig(**_WAVE, conv_depthwise_kernel_size=3, position_embeddings_type="rotary"),
        wave,
    ),
    "wav2vec2-bert": (
        "Wav2Vec2BertModel",
        lambda: hf.Wav2Vec2BertConfig(**_SMALL, feature_projection_input_dim=16, conv_depthwise_kernel_size=3),
        frames,
    ),
    "parakeet": ("ParakeetEncoder", lambda: hf.ParakeetEncoderConfig(**_PARAKEET), frames),
    "qwen2-audio": ("Qwen2AudioEncoder", lambda: hf.Qwen2AudioEncoderConfig(**_LIKE_WHISPER), mel),
    "voxtral": (
        "VoxtralEncoder",
        lambda: hf.VoxtralEncoderConfig(
            **_SMALL, head_dim=8, num_mel_bins=8, max_source_positions=12, num_key_value_heads=4
        ),
        mel,
    ),
    "timesfm": (
        "TimesFmModel",
        lambda: hf.TimesFmConfig(
            **_SMALL, head_dim=8, patch_length=4, context_length=32, use_positional_embedding=True
        ),
        lambda: {
            "past_values": normal(1, 32),
            "past_values_padding": torch.zeros(1, 32),
            "freq": torch.zeros(1, 1, dtype=torch.int64),
        },
    ),
    "patchtst": (
        "PatchTSTModel",
        lambda: hf.PatchTSTConfig(**_PATCHES),
        lambda: {"past_values": normal(1, 32, 2)},
    ),
    "patchtst with a class token": (
        "PatchTSTModel",
        lambda: hf.PatchTSTConfig(
            **_PATCHES,
            use_cls_token=True,
            positional_encoding_type="sincos",
        ),
        lambda: {"past_values": normal(1, 32, 2)},
    ),
}


def tiny(name: str, **options: Any) -> PreTrainedModel:
    """A model of a family in evaluation mode, in which every weight has an effect.

    Args:
        name: the family.
        **options: changes of its config.
    """
    class_name, config, _ = FAMILIES[name]
    made = config()
    for option, value in options.items():
        setattr(made, option, value)
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(hf, class_name)(made).eval()
    stir(model)
    return model


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


def inputs(name: str) -> dict[str, Tensor]:
    """The input of a family."""
    return FAMILIES[name][2]()


@torch.no_grad()
def output(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The first output of a model; sequences of tokens of any model have this."""
    found: Tensor = model(**{name: value.clone() for name, value in given.items()})[0]
    return found
