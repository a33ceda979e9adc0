"""`hf-posenc eval minimal-pairs`."""

import json

import pytest

from hf_posenc.cli import main
from hf_posenc.metrics.minimal_pairs import minimal_pairs_accuracy
from tests.cli.conftest import save_tokenizer
from tests.cli.running import refused


@pytest.fixture
def task(tmp_path):
    examples = [
        {"input": f"{first} dog ", "target_scores": {"chased": 1, "cat": 0}, "comment": comment}
        for first, comment in (("the", "singular_plural"), ("another", "plural_plural"))
    ]
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"name": "tiny", "examples": examples}))
    return str(path)


@pytest.fixture
def causal(llama, tmp_path):
    """A folder with the tokenizer that the model lacks."""
    folder = tmp_path / "tokenizer"
    save_tokenizer(folder)
    return ["eval", "minimal-pairs", llama, "--tokenizer", str(folder)]


def test_json_holds_what_the_function_returns(capsys, causal, task):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main([*causal, "--task", task, "--schemes", "native", "none", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(causal[2]), AutoTokenizer.from_pretrained(causal[4])
    expected = minimal_pairs_accuracy(model, tokenizer, task, ["native", "none"])
    assert printed == json.loads(json.dumps(expected.to_dict()))


def test_samples(capsys, causal, task):
    assert main([*causal, "--task", task, "--samples", "1"]) == 0
    assert "1 of 2 pairs" in capsys.readouterr().out
    assert main([*causal, "--task", task]) == 0
    assert "scoring, 2 pairs" in capsys.readouterr().out


def test_bad_requests(capsys, causal, bert, task, tmp_path):
    assert "pip download" in refused(capsys, *causal, "--task", str(tmp_path / "missing.json"))
    assert "samples is -1" in refused(capsys, *causal, "--task", task, "--samples", "-1")
    assert "no mask token" in refused(capsys, "eval", "minimal-pairs", bert, "--task", task)
