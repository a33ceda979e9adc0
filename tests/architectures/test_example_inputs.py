"""Architectures that need more than tokens, an image or a series are run with the arguments that they declare."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc import Architecture, UnsupportedError, native_scheme, patch_model, register_architecture
from hf_posenc.patching.anatomy.architectures import declaration

from .population import pair_named
from .tiny import tiny_model


@pytest.mark.parametrize(
    ("pair", "part", "native"),
    [
        ("audio-text-csm", "text", "rope"),
        ("audio-text-dia", "text", "rope"),
        ("audio-text-kyutai_speech_to_text", "text", "rope"),
        ("audio-text-voxtral_realtime", "text", "rope"),
        ("audio-text-voxtral_realtime", "audio", "rope"),
        ("audio-text-pe_audio", "audio", "rope"),
        ("image-text-idefics", "text", "rope"),
        ("image-text-paddleocr_vl", "vision", "composed"),
        ("image-text-xclip", "vision", "learned"),
        ("vision-minicpm_ocr_vision", "vision", "learned"),
        ("video-videomt", "vision", "learned"),
        ("other-jev", "text", "mrope"),
        ("other-blt", "text", "rope"),
        ("other-blt", "global", "rope"),
        ("audio-text-granite_speech", "projector", "none"),
        ("image-text-deepseek_ocr2", "vision", "rope"),
        ("image-text-molmo2", "vision", "learned"),
        ("image-text-unlimited_ocr", "vision", "learned"),
    ],
)
def test_a_declared_run_finds_the_native_scheme(pair: str, part: str, native: str) -> None:
    assert native_scheme(tiny_model(pair_named(pair)), part=part).name == native


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ("image-text-kimi_k25", "several position tables"),
        ("image-text-muse_glimmer", "resized with zeros around it"),
        ("vision-seggpt", "decomposed bias tables"),
        ("vision-inkling2_vision", "acts in attention"),
    ],
)
def test_without_a_name_the_reason_is_the_mechanism(pair: str, reason: str) -> None:
    model = tiny_model(pair_named(pair))
    with pytest.raises(UnsupportedError, match=reason):
        native_scheme(model, part="vision")
    patch_model(model, "none", part="vision")


def windows_of_frames(module: Any, tokens: int) -> dict[str, Any]:
    frames = 4 * module.config.n_window
    features = torch.randn(1, module.config.num_mel_bins, frames, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "input_features_mask": torch.ones(1, frames, dtype=torch.int64)}


def test_a_user_can_state_the_arguments_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And sinusoids that restart in windows packed in one row are noticed."""
    model = tiny_model(pair_named("audio-text-qwen3_asr"))
    monkeypatch.setattr(declaration, "_ARCHITECTURES", dict(declaration._ARCHITECTURES))
    register_architecture("qwen3_asr_encoder", architecture=Architecture())
    with pytest.raises(UnsupportedError, match=r"qwen3_asr_encoder.*example_inputs"):
        patch_model(model, "rope", part="audio")
    register_architecture("qwen3_asr_encoder", architecture=Architecture(example_inputs=windows_of_frames))
    with pytest.raises(UnsupportedError, match="first layer depends on the position of tokens"):
        patch_model(model, "rope", part="audio")


def test_declared_numbers_have_the_dtype_of_the_model() -> None:
    model = tiny_model(pair_named("audio-text-voxtral_realtime")).to(torch.bfloat16)
    assert native_scheme(model, part="audio").name == "rope"


def test_a_declaration_leaves_the_random_generator_alone() -> None:
    model = tiny_model(pair_named("image-text-paddleocr_vl"))
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    native_scheme(model, part="vision")
    assert torch.equal(torch.rand(1), expected)
