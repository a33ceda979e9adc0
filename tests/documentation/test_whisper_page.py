"""The how-to page about Whisper: its files run with a small model of random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import WhisperFeatureExtractor

from hf_posenc import unpatch_model
from tests.documentation.test_how_to import empty_folder, run_file, save_files  # noqa: F401
from tests.models import tiny

PAGE = "whisper_past_30_seconds"
#: One second in place of 30: 50 tokens of 20 ms.
SECONDS = 1


def test_a_whisper_takes_longer_sound_trains_and_transcribes(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    tiny("WhisperForConditionalGeneration", max_source_positions=50 * SECONDS).save_pretrained("stock")
    WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS).save_pretrained("stock")
    waves = torch.randn(2, 2 * 16_000)
    torch.save([(wave, torch.randint(3, 40, (6,))) for wave in waves], "recordings.pt")
    save_files(PAGE)
    extended = run_file("extend.py", "stock", "2", "longer")["model"]
    assert extended.config.max_source_positions == 100
    assert "audio: 100 tokens, 50 natively" in capsys.readouterr().out
    run_file("train.py", "longer")
    assert capsys.readouterr().out.count("loss") == 2
    model = run_file("transcribe.py", "longer")["model"]
    assert "200 frames" in capsys.readouterr().out
    assert model.config.max_source_positions == 100
    unpatch_model(model)
    assert model.config.max_source_positions == 50
    assert Path("longer").is_dir()
