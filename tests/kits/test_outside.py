"""The kit for the suites of others, run on a suite with a test that any model passes, and one that sees the scheme."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh import run_python

SUITE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForQuestionAnswering

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)


def test_it_runs():
    config = LlamaConfig(**SIZES)
    for kind in (LlamaForCausalLM, LlamaForQuestionAnswering):
        kind(config)(torch.tensor([[3, 4, 5]]))


def test_it_rotates(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert getattr(model, "position_encoding", None) is None, "it has a scheme"
"""


@pytest.mark.long
def test_differences_from_the_stock_models_are_listed(tmp_path: Path) -> None:
    (tmp_path / "checkout" / "tests").mkdir(parents=True)
    (tmp_path / "checkout" / "tests" / "test_of_others.py").write_text(SUITE)
    words = ["tests", "--arms", "alibi", "--out", tmp_path / "out"]
    run = run_python("-m", "tests.kits.outside", tmp_path / "checkout", *words)
    rows = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert rows[2:] == ["| stock | 2 | 0 | 0 | 0 | 0 | 0 |", "| alibi | 1 | 1 | 0 | 0 | 1 | 0 |"], run.stderr[-2000:]
    assert "test_it_rotates" in run.stdout
    assert run.returncode == 1
