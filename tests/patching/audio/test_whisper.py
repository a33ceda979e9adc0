"""Whisper: both parts, any number of frames, lengths, generation, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from hf_posenc import extend_context, native_scheme, patch_model, unpatch_model
from hf_posenc.errors import SequenceLengthError
from tests.models import tiny

from .whisper import normal, output, stir

pytestmark = pytest.mark.on_cpu("these models make a weight on the CPU, whatever the default device")

IDS = torch.tensor([[1, 7, 9, 11, 5]])


@pytest.fixture
def whisper() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    model = tiny("WhisperForConditionalGeneration").eval()
    stir(model)
    # A random model repeats a token; ends and forbidden tokens would hide differences.
    model.generation_config.update(suppress_tokens=None, begin_suppress_tokens=None, eos_token_id=None)
    return model


def spectrogram(frames: int = 24) -> torch.Tensor:
    """`(1, bins, frames)`; the native length of the tiny model is 24 frames, 12 tokens."""
    return normal(1, 8, frames)


def logits(model: WhisperForConditionalGeneration, frames: int = 24) -> torch.Tensor:
    return output(model, {"input_features": spectrogram(frames), "decoder_input_ids": IDS})


def test_a_loaded_table_is_still_a_formula(whisper: WhisperForConditionalGeneration, tmp_path: Path) -> None:
    whisper.save_pretrained(tmp_path)
    loaded = WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
    # transformers loads the frozen table as a trainable one.
    assert loaded.model.encoder.embed_positions.weight.requires_grad
    assert native_scheme(loaded, part="audio") == native_scheme(whisper, part="audio")
    with torch.no_grad():
        loaded.model.encoder.embed_positions.weight[5, 3] += 0.01
    assert native_scheme(loaded, part="audio").name == "learned"


def test_hidden_states_and_attentions_are_recorded(whisper: WhisperForConditionalGeneration) -> None:
    whisper.set_attn_implementation("eager")
    patch_model(whisper, "rope", part="audio")
    found = whisper.model.encoder(spectrogram(60), output_hidden_states=True, output_attentions=True)
    assert [one.shape[1] for one in found.hidden_states] == [30] * 3
    assert [one.shape[-1] for one in found.attentions] == [30] * 2


def test_a_learned_table_says_how_long_a_sound_may_be(whisper: WhisperForConditionalGeneration) -> None:
    patch_model(whisper, "learned", part="audio")
    with pytest.raises(SequenceLengthError, match="12 positions"):
        logits(whisper, 60)
    with pytest.raises(SequenceLengthError, match="12 positions"):
        extend_context(whisper, length=30, part="audio")
    patch_model(whisper, "learned", part="audio", num_positions=30)
    assert logits(whisper, 60).isfinite().all()


def test_lengths_of_both_parts(whisper: WhisperForConditionalGeneration, tmp_path: Path) -> None:
    patch_model(patch_model(whisper, "rope", part="audio"), "alibi", part="text")
    extend_context(whisper, length=30, part="audio")
    extend_context(whisper, length=100)
    assert (whisper.config.max_source_positions, whisper.config.max_target_positions) == (30, 100)
    assert "100 tokens, 20 natively" in whisper.position_encoding.report.context
    assert "audio: 30 tokens, 12 natively" in whisper.position_encoding.report.context
    labels = torch.randint(3, 40, (1, 50))
    assert whisper(input_features=spectrogram(60), labels=labels).loss.isfinite()
    patch_model(whisper, "t5", part="audio")
    assert whisper.config.max_source_positions == 30
    whisper.save_pretrained(tmp_path)
    loaded = WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert (loaded.config.max_source_positions, loaded.config.max_target_positions) == (30, 100)
    assert torch.equal(logits(loaded, 60), logits(whisper, 60))
    unpatch_model(whisper)
    assert (whisper.config.max_source_positions, whisper.config.max_target_positions) == (12, 20)
    with pytest.raises(ValueError, match="Labels' sequence length"):
        whisper(input_features=spectrogram(), labels=labels)


@pytest.mark.parametrize("scheme", ["t5", "sinusoidal"])
def test_generation_beyond_the_native_lengths(whisper: WhisperForConditionalGeneration, scheme: str) -> None:
    patch_model(patch_model(whisper, scheme, part="audio"), scheme, part="text")
    extend_context(whisper, length=30, part="audio")
    extend_context(whisper, length=60)
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    cached = whisper.generate(spectrogram(60), **options)
    full = whisper.generate(spectrogram(60), use_cache=False, **options)
    assert cached.shape[1] >= 40
    assert torch.equal(cached, full)
