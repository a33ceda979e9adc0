"""`hf-posenc eval generalization`."""

import json

import pytest
import torch
from transformers import ByT5Tokenizer

from hf_posenc import patch_model
from hf_posenc.cli import main
from hf_posenc.metrics.generalization import compare_generalization
from tests.cli.running import refused
from tests.models import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A patched model with a tokenizer of bytes in a folder."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()
    model = tiny(
        "LlamaForCausalLM", vocab_size=len(tokenizer), initializer_range=0.2, pad_token_id=0, bos_token_id=None,
        eos_token_id=1, num_hidden_layers=1,
    )  # fmt: skip
    patch_model(model, "alibi").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_json_holds_what_the_function_returns(capsys, trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = ["eval", "generalization", trained, "--task", "parity", "--lengths", "6", "3", "--samples", "20", "--json"]
    assert main([*words, "--seed", "4"]) == 0
    printed = json.loads(capsys.readouterr().out)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    expected = compare_generalization(model, tokenizer, "parity", [3, 6], samples=20, seed=4)
    assert expected.labels == ["alibi"]
    assert printed == json.loads(json.dumps(expected.to_dict()))


def test_one_model_is_a_table_of_lengths_and_several_schemes_one_line_each(capsys, trained):
    words = ["eval", "generalization", trained, "--task", "copy", "--lengths", "2", "30", "--samples", "3"]
    assert main([*words, "--method", "generate"]) == 0
    out = capsys.readouterr().out
    assert "task 'copy' (generate, seed 0)" in out
    assert "alibi" in out
    assert main([*words, "--schemes", "native", "learned:num_positions=20", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| native (rope" in out
    assert "learned(num_positions=20)" in out
    assert "length 30: " in out


def test_bad_requests(capsys, trained, bert):
    words = ["eval", "generalization"]
    assert "Did you mean 'parity'" in refused(capsys, *words, trained, "--task", "party")
    assert "whole number from 1" in refused(capsys, *words, trained, "--task", "copy", "--lengths", "0")
    assert "knows 16: it is that of another model" in refused(
        capsys, *words, bert, "--tokenizer", trained, "--task", "copy"
    )
