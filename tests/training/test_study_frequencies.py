"""Which frequencies heads use."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import UnsupportedError, patch_model
from tests.fixtures.make import CHECKPOINTS
from training.study import frequencies
from training.study.frequencies import frequency_usage

TOKENS = torch.arange(3, 67).repeat(2, 1)


def test_shares_follow_the_norms_of_queries_and_keys() -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "rope").float()
    usage = frequency_usage(model, TOKENS)
    assert usage.shape == (2, 4, 8)
    torch.testing.assert_close(usage.sum(-1), torch.ones(2, 4))
    # Pair 5 of head 1 of the second layer: dimensions 5 and 13 of 16.
    with torch.no_grad():
        for row in (16 + 5, 16 + 13):
            model.model.layers[1].self_attn.q_proj.weight[row] *= 3
    changed = frequency_usage(model, TOKENS)
    before = usage[1, 1]
    expected = before.clone()
    expected[5] *= 3
    torch.testing.assert_close(changed[1, 1], expected / expected.sum(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(changed[1, 0], usage[1, 0])


def test_a_scheme_without_rotation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "alibi").float()
    with pytest.raises(UnsupportedError, match="no rotation of pairs"):
        frequency_usage(model, TOKENS)
    with pytest.raises(UnsupportedError, match="no rotation of pairs"):
        frequency_usage(patch_model(model, "pope"), TOKENS)
    assert frequencies.main([str(tmp_path), str(tmp_path / "out.csv")]) == 2
    assert "no trained model of 'rope'" in capsys.readouterr().err


def test_the_models_of_a_study_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    for seed in (0, 1):
        (tmp_path / "models" / f"causal-rope-seed{seed}").symlink_to(CHECKPOINTS / "rope")
    stream = type("Stream", (), {"tokens": lambda self: torch.arange(3, 2003).remainder(250).int().numpy()})()
    monkeypatch.setattr(frequencies.Corpus, "open_streams", lambda folder: (stream, stream))
    assert frequencies.main([str(tmp_path), str(tmp_path / "out.csv")]) == 0
    frame = pd.read_csv(tmp_path / "out.csv")
    assert len(frame) == 2 * 2 * 4 * 8
    assert set(frame.seed) == {0, 1}
    assert frame.groupby(["seed", "layer", "head"]).share.sum().sub(1).abs().max() < 1e-3
