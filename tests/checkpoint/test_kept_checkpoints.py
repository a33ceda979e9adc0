"""Checkpoints that an earlier version wrote, and that every later one has to load: tests/fixtures/make.py made them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fixtures.make import CHECKPOINTS, SCHEMES


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_kept_checkpoint_gives_the_logits_that_it_gave(scheme: str) -> None:
    folder = CHECKPOINTS / scheme
    expected = json.loads((folder / "expected.json").read_text())
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.position_encoding.config.name == scheme
    assert model.dtype == torch.bfloat16
    tokens = torch.tensor([expected["tokens"]])
    with torch.no_grad():
        logits = model.float()(tokens).logits[0, -1]
    # Stored with four digits; processors sum in other orders.
    torch.testing.assert_close(logits, torch.tensor(expected["next_logits"]), rtol=1e-3, atol=1e-3)


def test_every_kept_checkpoint_is_small() -> None:
    found = sorted(folder.name for folder in Path(CHECKPOINTS).iterdir())
    assert found == sorted(SCHEMES)
    assert all(path.stat().st_size < 300_000 for path in CHECKPOINTS.rglob("*") if path.is_file())
