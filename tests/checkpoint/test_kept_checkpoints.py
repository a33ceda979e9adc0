"""Checkpoints that an earlier version wrote, and that every later one has to load: tests/fixtures/make.py made them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc import unpatch_model
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


def test_the_checkpoints_were_trained_and_differ() -> None:
    rows = [json.loads((CHECKPOINTS / scheme / "expected.json").read_text())["next_logits"] for scheme in SCHEMES]
    logits = torch.tensor(rows)
    assert torch.pdist(logits).min() > 1
    # A letter or a space is likely after "was", and no byte above 127.
    assert (logits.softmax(-1)[:, 3 + 128 : 3 + 256].sum(-1) < 0.01).all()


def test_every_kept_checkpoint_is_small() -> None:
    found = sorted(folder.name for folder in Path(CHECKPOINTS).iterdir())
    assert found == sorted(SCHEMES)
    assert all(path.stat().st_size < 300_000 for path in CHECKPOINTS.rglob("*") if path.is_file())


def test_without_its_scheme_a_checkpoint_says_something_else() -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "alibi").float()
    tokens = torch.tensor([json.loads((CHECKPOINTS / "alibi" / "expected.json").read_text())["tokens"]])
    with torch.no_grad():
        patched = model(tokens).logits[0, -1]
        unpatch_model(model)
        stock = model(tokens).logits[0, -1]
    assert (patched - stock).abs().max() > 0.1
    assert AutoConfig.from_pretrained(CHECKPOINTS / "rope").num_hidden_layers == 2
