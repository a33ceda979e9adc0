"""Studies with a custom scheme, another architecture, and one text file."""

import json
import multiprocessing
import os
import shutil
import sys

import pytest
import torch
from transformers import BertConfig, LlamaConfig

from hf_posenc import extensions
from hf_posenc.schemes import registry
from tests.cli.test_schemes import THIRD_PARTY
from training import compare, run_clm
from training.errors import SettingsError
from training.files import write_json
from training.study import executors
from training.study.corpus import study_tokenizer
from training.study.models import new_image_model, new_model
from training.study.settings import StudySettings, TrainingSettings
from training.study.tasks import study_task


@pytest.fixture
def own_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(extensions, "_imported", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
    source = THIRD_PARTY.replace("SchemeConfig):", "NoneConfig):").replace("far_for_tests", "own_for_tests")
    (tmp_path / "own_schemes.py").write_text(source)
    yield "own_for_tests"
    sys.modules.pop("own_schemes", None)


def forget_the_module():
    """As in a new process."""
    sys.modules.pop("own_schemes")
    registry._SCHEMES.pop("own_for_tests")
    extensions._imported = None


def edit_the_scheme(folder):
    path = folder / "own_schemes.py"
    path.write_text(path.read_text() + "\n\nCHANGED = True  # any statement\n")


@pytest.mark.long
def test_one_file_another_architecture_and_an_imported_scheme(tmp_path, own_scheme, capsys, monkeypatch):
    def only_results(results, folder):
        write_json(folder / "results.json", results)
        (folder / "table.md").write_text("")
        return []

    # Figures and cards take longer than the study, and so do the imports of each worker.
    monkeypatch.setattr(compare, "write_outputs", only_results)
    forks = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(executors.multiprocessing, "get_context", lambda method: forks)
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {number} has a few words." for number in range(60)))
    settings = {
        "imports": ["own_schemes"], "schemes": ["rope", own_scheme, "stretched"], "tasks": ["causal"],
        "scheme_options": {"stretched": {"scheme": "rope", "from": "rope", "training": {"max_steps": 0}}},
        "model_type": "qwen3", "seeds": [0, 1], "dataset_name": "text.txt", "output_dir": "out", "max_steps": 2,
        "eval_every": 1, "batch_size": 2, "train_length": 8, "length_factor": 2, "hidden_size": 16, "num_heads": 2,
        "num_layers": 1, "eval_windows": 2, "warmup_steps": 1, "workers": 2, "validation_fraction": 0.2,
    }  # fmt: skip
    (tmp_path / "study.yaml").write_text(json.dumps(settings))  # JSON is YAML
    assert compare.main(["study.yaml"]) == 0, capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {run["status"] for run in results["runs"]} == {"finished"}
    assert [run["scheme"] for run in results["runs"]] == ["rope", "rope", own_scheme, own_scheme, *["stretched"] * 2]
    assert results["tasks"]["causal"]["model"] == "Qwen3ForCausalLM"
    assert results["settings"]["imports"] == ["own_schemes"]
    # It goes on where it was, and in words of the command line too.
    assert compare.main(["study.yaml", "--import", "own_schemes"]) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["runs"] == results["runs"]
    forget_the_module()
    # Results of the earlier code are not shown as if the changed code had made them.
    edit_the_scheme(tmp_path)
    capsys.readouterr()
    assert compare.main(["study.yaml"]) == 2
    assert "own_for_tests-seed0 in out was started with other settings: code of the scheme" in capsys.readouterr().err
    for seed in (0, 1):
        shutil.rmtree(tmp_path / "out" / "trainings" / f"causal-own_for_tests-seed{seed}")
    assert compare.main(["study.yaml", "--workers=1"]) == 0


def test_a_module_that_does_not_exist_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert compare.main(["--import", "nowhere_to_be_found"]) == 2
    assert run_clm.main(["--import", "nowhere_to_be_found", "--model_type", "llama", "--output_dir", "out"]) == 2
    assert capsys.readouterr().err.count("no module 'nowhere_to_be_found'") == 2


def test_a_run_takes_an_imported_scheme(tmp_path, own_scheme, capsys):
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Document {number} has a few words. " * 10)
    words = [
        "--import", "own_schemes", "--scheme", own_scheme, "--model_type", "llama", "--tokenizer_name", "bytes",
        "--config_overrides", "hidden_size=16,intermediate_size=16,num_hidden_layers=1,num_attention_heads=2",
        "--dataset_name", "text", "--block_size", "16", "--max_steps", "1", "--output_dir", "out", "--do_train",
        "--report_to", "none", "--validation_split_percentage", "30",
    ]  # fmt: skip
    assert run_clm.main(words) == 0, capsys.readouterr().err
    forget_the_module()
    edit_the_scheme(tmp_path)
    assert run_clm.main(words) == 2
    assert "code of the scheme was" in capsys.readouterr().err
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["position_encoding"]["scheme"]["scheme"]
        == own_scheme
    )


def task(name="causal", **settings):
    return study_task(name, TrainingSettings(**{"hidden_size": 32, "num_layers": 1, "num_heads": 2} | settings))


def built(name="causal", positions=24, **settings):
    chosen = task(name, **settings)
    if name == "images":
        return new_image_model(chosen, chosen.settings, classes=2)
    return new_model(chosen, chosen.settings, study_tokenizer(StudySettings()), positions)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("causal", name) for name in ("gpt2", "gemma2", "opt", "gpt_neox", "mistral", "bloom")]
    + [("masked", name) for name in ("roberta", "modernbert", "distilbert", "deberta-v2")],
)
def test_architectures_of_a_study_read_its_longest_sequence(name, model_type):
    model = built(name, model_type=model_type).eval()
    assert model.config.hidden_size == 32
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert model(input_ids=torch.arange(3, 27)[None]).logits.shape[:2] == (1, 24)


def test_the_default_architectures():
    common = {
        "vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 24, "initializer_range": 0.05, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    llama = LlamaConfig(**common, tie_word_embeddings=True, use_cache=False)
    bert = BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    for name, config in (("causal", llama), ("masked", bert)):
        fields = built(name).config.to_dict()
        assert fields | {"architectures": None, "dtype": None} == config.to_dict() | {"dtype": None}


WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("settings", "overrides", "expected"),
    [
        ({"model_type": "qwen2", "num_layers": 2}, WINDOWS | {"intermediate_size": 48}, {"hidden_size": 32}),
        ({"name": "images"}, {"qkv_bias": False}, {}),
        # Fields go by the names of the architecture, too.
        ({"model_type": "gpt2"}, {"n_inner": 40}, {"n_embd": 32}),
        ({"model_type": "gpt2"}, {"n_positions": 50}, {"max_position_embeddings": 50}),
        ({"model_type": "llama"}, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, {}),
    ],
)
def test_further_fields_of_the_config(settings, overrides, expected):
    config = built(**settings, config_overrides=overrides).config
    for name, value in (overrides | expected).items():
        assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("settings", "overrides", "message"),
    [
        ({"model_type": "lama"}, {}, "Did you mean 'llama'"),
        ({"name": "masked", "model_type": "llama"}, {}, "cannot be used for the task 'masked'"),
        ({"model_type": "mamba"}, {}, "no num_attention_heads"),
        ({"name": "repeated_copy", "model_type": "encoder-decoder"}, {}, "encoder-decoder"),
        ({}, {"sliding_windows": 4}, "--config_overrides: Unknown field 'sliding_windows' of LlamaConfig"),
        ({"model_type": "gpt2"}, {"n_embd": 64}, "sets n_embd, which --hidden_size determines"),
        ({}, {"model_type": "gpt2"}, "sets model_type, which --model_type determines"),
        ({}, {"hidden_act": "geluu"}, "KeyError: 'geluu'"),
        ({}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "Missing required keys"),
    ],
)
def test_architectures_and_fields_that_cannot_be_studied(settings, overrides, message):
    with pytest.raises(SettingsError, match=message):
        built(**settings, config_overrides=overrides)


def test_fields_are_recorded_as_they_are_read_again_and_a_training_began_with_them():
    plain, given = TrainingSettings(), TrainingSettings(config_overrides={"id2label": {0: "a"}})
    assert given.fingerprint() == json.loads(json.dumps(given.fingerprint()))
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        TrainingSettings(config_overrides={"sliding_window": {1, 2}})
    # Trainings that were made before the setting existed go on.
    assert "config_overrides" not in plain.fingerprint()
    changed = plain.changed({"config_overrides": {"rope_theta": 100.0}}, "The study")
    assert changed.fingerprint() == plain.fingerprint() | {"config_overrides": {"rope_theta": 100.0}}
