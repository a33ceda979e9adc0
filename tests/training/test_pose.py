"""PoSE in the training scripts: short rows at the positions of longer texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.training.run_cases import SIZES, losses, recorded_calls, run, words
from training.data.text import RowSkips

#: Large enough for positions to matter at the first step, and without dropout.
LARGE = json.dumps(SIZES | {"initializer_range": 0.3})
POSE: dict[str, Any] = {"pose_length": 200, "config_overrides": LARGE, "max_steps": 3}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Any, Any]]:
    return recorded_calls(monkeypatch, LlamaForCausalLM)


@pytest.mark.parametrize(
    ("packing", "scheme"), [("documents", None), ("concatenate", None), ("documents", "rope"), ("concatenate", "alibi")]
)
def test_a_llama_trains_at_the_positions_of_longer_texts(
    packing: str, scheme: str | None, texts: Path, tmp_path: Path, seen: list[Any]
) -> None:
    common = POSE | {"packing": packing, "scheme": scheme}
    assert run(words(texts, tmp_path / "pose", **common)) == 0
    trained = [(positions, mask) for training, positions, mask in seen if training]
    assert len(trained) == 3
    for positions, mask in trained:
        assert mask is not None, "transformers would take every skip for another document"
        steps = positions.diff(dim=-1)
        assert (positions[:, 0] == 0).all()
        # A step down is the first token of another document.
        assert ((steps >= 1) | (positions[:, 1:] == 0)).all()
        assert (steps > 1).any()
        assert int(positions.max()) < 200
        if packing == "concatenate":
            assert ((steps > 1).sum(-1) <= 1).all()
    # The model was built for 64, and rows have 32 tokens.
    assert max(int(positions.max()) for positions, _ in trained) >= 64
    evaluated = [positions for training, positions, _ in seen[-2:] if not training]
    assert evaluated
    assert all(positions is None or int(positions.max()) < 32 for positions in evaluated)
    assert run(words(texts, tmp_path / "plain", **(common | {"pose_length": None}))) == 0
    assert losses(tmp_path / "pose")[0] != losses(tmp_path / "plain")[0]
    recorded = json.loads((tmp_path / "pose/run_settings.json").read_text())
    assert (recorded["pose_length"], recorded["pose_chunks"]) == (200, 2)
    assert "pose_length" not in json.loads((tmp_path / "plain/run_settings.json").read_text())


def test_the_positions_are_those_of_the_seed(texts: Path, tmp_path: Path) -> None:
    for name in ("first", "again"):
        assert run(words(texts, tmp_path / name, pose_chunks=3, **POSE)) == 0
    assert losses(tmp_path / "first") == losses(tmp_path / "again")
    places = torch.arange(32)
    drawn = [RowSkips(200, 2, seed)(places, epoch, row) for seed, epoch, row in ((3, 1, 5), (4, 1, 5), (3, 2, 5))]
    drawn.append(RowSkips(200, 2, 3)(places, 1, 6))
    assert len({tuple(positions.tolist()) for positions in drawn}) == 4
    assert torch.equal(drawn[0], RowSkips(200, 2, 3)(places, 1, 5))
