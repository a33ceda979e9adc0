"""eval/position_encoding, as `evaluate.load` takes it without a network."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf_posenc import patch_model
from hf_posenc.errors import UsageError
from hf_posenc.evaluations import EVALUATIONS
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.generalization import compare_generalization
from hf_posenc.metrics.language_modeling import text_losses
from hf_posenc.metrics.minimal_pairs import minimal_pairs_accuracy
from hf_posenc.metrics.sensitivity import ENGLISH, sensitivity_test
from tests.models import tiny

MODULE = Path(__file__).parents[1] / "eval" / "position_encoding"
TEXT = "the dog chased another dog and the cat, quick as ever, ran after a small red ball in the garden. " * 6


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`evaluate.load` of an evaluation, offline and with caches of its own."""
    import evaluate

    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda name: evaluate.load(str(MODULE), name, cache_dir=str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    model = tiny(
        "LlamaForCausalLM", vocab_size=len(tokenizer), initializer_range=0.2, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    return patch_model(model, "alibi").eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, tokenizer):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def as_json(value):
    return json.loads(json.dumps(value))


def test_loss_by_length(load, folder, model, tokenizer):
    options = {"lengths": [16, 64], "max_windows": 2, "tail": 8}
    found = load("loss").compute(data=[TEXT], model=folder, **options)
    assert as_json(found) == as_json(text_losses(model, tokenizer, [TEXT], **options).to_dict())


def test_position_sensitivity(load, model):
    words = [*ENGLISH.nouns, *ENGLISH.verbs, *ENGLISH.fillers, ENGLISH.article, ENGLISH.another, ENGLISH.closing]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["[UNK]", *words]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[UNK]")
    text = " ".join(words * 3)
    options = {"gaps": [4], "offsets": [16], "context": 16}
    found = load("sensitivity").compute(data=[text], model=model, tokenizer=tokenizer, **options)
    assert as_json(found) == as_json(sensitivity_test(model, tokenizer, text=text, **options).to_dict())


def test_length_generalization(load, folder, model, tokenizer):
    found = load("generalization").compute(data=["copy", "parity"], model=folder, lengths=[3, 5], samples=8)
    assert set(found) == {"copy", "parity"}
    expected = compare_generalization(model, tokenizer, "parity", [3, 5], samples=8)
    assert as_json(found["parity"]) == as_json(expected.to_dict())


def test_minimal_pairs(load, tmp_path, model, tokenizer):
    path = str(tmp_path / "task.json")
    examples = [{"input": f"the {noun} ", "target_scores": {"sees": 1, "see": 0}} for noun in ("cat", "dog")]
    Path(path).write_text(json.dumps({"name": "tiny", "examples": examples}))
    found = load("minimal-pairs").compute(data=[path], model=model, tokenizer=tokenizer)
    assert as_json(found[path]) == as_json(minimal_pairs_accuracy(model, tokenizer, path).to_dict())


def test_errors_of_the_library_come_through(load, model, tokenizer, tmp_path):
    module = load("generalization")
    with pytest.raises(MeasurementError, match="whole number"):
        module.compute(data=["copy"], model=model, tokenizer=tokenizer, lengths=[0])
    with pytest.raises(ValueError, match="Pass tokenizer="):
        load("generalization").compute(data=["copy"], model=model)
    with pytest.raises(UsageError, match="cannot load"):
        load("minimal-pairs").compute(data=["x"], model=str(tmp_path))


@pytest.mark.parametrize("name", [name for name, evaluation in EVALUATIONS.items() if evaluation.data is not None])
def test_a_module_says_what_it_takes(load, name):
    module = load(name)
    assert "model: a transformers model" in module.inputs_description
    assert module.description


def test_an_evaluation_that_does_not_exist_is_refused(load):
    with pytest.raises(ValueError, match=r"no evaluation 'los'.*'loss'"):
        load("los")
    with pytest.raises(ValueError, match="no evaluation 'properties'"):
        load("properties")
