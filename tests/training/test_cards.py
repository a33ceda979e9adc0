"""Model cards of a study: what they say, whether the hub's own classes read them back, and a model beside one."""

from __future__ import annotations

import math
import re

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_posenc import patch_model
from tests.training.study_results import LENGTHS, finished, study, three_seeds
from training.study.cards import card_name, format_index, study_cards, write_cards, write_model_cards
from training.study.outputs import main, write_outputs
from training.study.schema import ResultsError


def with_models(results):
    for run in results["runs"]:
        if run["status"] == "finished":
            run["model"] = f"models/{run['task']}-{run['scheme']}-seed{run['seed']}"
    return results


@pytest.fixture(scope="module")
def results():
    return with_models(three_seeds())


@pytest.fixture(scope="module")
def cards(results):
    return {card_name(results, run): card for run, card in study_cards(results)}


def test_there_is_a_card_for_every_saved_model_and_no_other(results, cards):
    assert len(cards) == sum(run["status"] == "finished" for run in results["runs"])
    assert study_cards(three_seeds()) == []


def test_the_hub_reads_every_result_back(results, tmp_path):
    written = write_cards(results, tmp_path)
    assert len(written) == len(study_cards(results)) + 1
    card = ModelCard.load(tmp_path / "tiny-causal-rope-500k-seed1.md", ignore_metadata_errors=False)
    card.data.to_yaml()
    assert card.data.model_name == "tiny-causal-rope-500k-seed1"
    found = {(score.metric_type, score.metric_name): score.metric_value for score in card.data.eval_results}
    losses = [2.625, 2.875, 3.125]
    expected = {("loss", f"Loss at {n} tokens"): loss for n, loss in zip(LENGTHS, losses, strict=True)}
    expected |= {
        ("perplexity", f"Perplexity at {n} tokens"): round(math.exp(loss), 3)
        for n, loss in zip(LENGTHS, losses, strict=True)
    }
    assert found == expected
    assert {score.dataset_type for score in card.data.eval_results} == {"sotu"}
    assert (card.data.pipeline_tag, card.data.license, card.data.language) == ("text-generation", "apache-2.0", "en")
    assert card.data.tags == ["hf_posenc", "position-encoding", "rope", "causal"]
    masked = ModelCard.load(tmp_path / "tiny-masked-none-seed0.md").data
    assert {score.task_type for score in masked.eval_results} == {"fill-mask"}
    copied = ModelCard.load(tmp_path / "tiny-copy-native-seed0.md").data
    assert [score.metric_value for score in copied.eval_results] == [1.0, 1.0, 0.5, 0.0]
    assert {score.metric_type for score in copied.eval_results} == {"exact_match"}


def test_a_card_says_how_to_repeat_and_load_the_model(cards):
    text = cards["tiny-causal-rope-500k-seed1"].text
    for part in (
        "python training/compare.py training/studies/tiny.yaml",
        '"theta": 500000.0',
        "seed 1",
        "1,234 parameters",
        "import hf_posenc  # before from_pretrained",
        'LlamaForCausalLM.from_pretrained("models/causal-rope-500k-seed1")',
        "works of the United States government",
        "MIT licence",
        "1bd1c416b61b8f77",
        "- Careful.",
        "## Intended use",
        "## Limits",
        "- transformers 5.23.0",
    ):
        assert part in text
    control = cards["tiny-causal-native-seed0"].text
    assert "import hf_posenc" not in control
    assert "this is the control" in control


def test_the_model_stands_beside_its_seeds_and_the_control(cards):
    text = cards["tiny-causal-rope-500k-seed1"].text
    line = next(line for line in text.splitlines() if line.startswith("|     16 "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["16", "2.625", "2.625 ± 0.311", "2.625 ± 0.311", "13.80"]
    assert "mean of 3 seeds" in text
    assert "control `native`" in text


def test_a_card_is_plain_markdown_without_leftovers(cards):
    for card in cards.values():
        assert "{{" not in card.content
        assert "{%" not in card.content
        assert "None" not in card.content
        assert "\n\n\n" not in card.content
        assert max(map(ord, card.content)) < 0x2000
        for block in re.findall(r"(?:^\|.*\n)+", card.text, flags=re.M):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_a_loss_that_is_no_number_is_no_result(tmp_path):
    run = finished("causal", "rope", model="models/a")
    run["by_length"]["loss"] = [2.5, 800.0, None]
    ((_, card),) = study_cards(study([run]))
    assert [score.metric_name for score in card.data.eval_results] == [
        "Loss at 16 tokens", "Perplexity at 16 tokens", "Loss at 32 tokens",
    ]  # fmt: skip
    assert "One seed: differences" in card.text


def test_other_text_has_an_unknown_licence_and_language():
    results = study([finished("causal", "rope", model="models/a")])
    results["corpus"]["source"] = "notes.txt"
    ((_, card),) = study_cards(results)
    assert "does not know the licence" in card.text
    assert "government" not in card.text
    assert card.data.language is None
    results["corpus"] = None
    with pytest.raises(ResultsError, match="the results have no corpus"):
        study_cards(results)


def test_processes_are_told_where_there_were_several():
    alone, shared = (finished("causal", "rope", seed=seed, model=f"models/{seed}") for seed in (0, 1))
    shared["processes"] = 2
    (_, first), (_, second) = study_cards(study([alone, shared]))
    assert "a processor, 1 thread(s)" in first.text
    assert "a processor, 2 processes of 1 thread(s)" in second.text


def test_a_model_from_another_one_says_so():
    longer = {"max_steps": 20, "train_length": 64, "learning_rate": 0.1}
    healed = finished("causal", "alibi", model="models/b", training=longer) | {"from": "rope"}
    ((_, card),) = study_cards(study([finished("causal", "rope"), healed]))
    assert "Trained further from the model `rope` of the same study, which was trained to predict" in card.text
    assert "`alibi` starts from the trained `rope` of the same seed, trained for 20 steps more." in card.text
    assert "| tokens per sequence | 64 |" in card.text
    assert "| learning_rate | 0.1 |" in card.text
    assert "| sequences per step | 4 |" in card.text


def test_a_model_from_another_one_counts_the_training_of_both():
    first = finished("causal", "rope")
    own = {"config": first["config"], "from": "rope"}
    longer = finished("causal", "longer", config=None, model="models/b", training={"train_length": 64}) | own
    read = finished("causal", "read", config=None, model="models/c", training={"max_steps": 0}) | own
    read["curve"] = {"step": [0], "train_loss": [], "validation_loss": [2.0]}
    results = study([first, longer, read])
    results["tasks"]["causal"] = results["tasks"]["causal"] | {"learning_rate": 0.002}
    (_, trained), (_, untrained) = study_cards(results)
    assert "Trained on 16, then 64 tokens" in trained.text
    assert "longer than the 64 tokens of training" in trained.text
    assert "40 steps of training" in trained.text
    assert "| learning_rate | 0.002 |" in trained.text
    assert "| steps | 0: the weights are those of `rope` |" in untrained.text
    assert "sequences per step" not in untrained.text
    assert "Trained on 16 tokens" in untrained.text
    assert "20 steps of training" in untrained.text


def test_the_mask_tells_dogs_apart_where_no_position_does():
    run = finished("causal", "none", model="models/a", dog={"layers": [0.0, 0.5], "probe": 0.0, "told_apart": False})
    ((_, card),) = study_cards(study([run]))
    assert "does not tell the two dogs apart" in card.text
    assert "0.5 (relative L2), which the causal mask alone makes." in card.text


def test_the_index_lists_cards_of_every_study_in_the_folder(results, tmp_path):
    write_cards(results, tmp_path)
    other = study([finished("copy", "rope", model="models/copy-rope-seed0")], name="other")
    write_cards(other, tmp_path)
    index = (tmp_path / "README.md").read_text()
    assert index == format_index(tmp_path)
    assert "[other-copy-rope-seed0](other-copy-rope-seed0.md)" in index
    assert "[tiny-masked-none-seed2](tiny-masked-none-seed2.md)" in index
    assert all((tmp_path / name).exists() for name in re.findall(r"\]\(([^)]+)\)", index) if name != "template.md")


def test_a_card_lies_beside_a_model_that_loads_with_it(tmp_path):
    results = study([finished("copy", "alibi", model="models/copy-alibi-seed0")])
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path / "models" / "copy-alibi-seed0"
    patch_model(LlamaForCausalLM(config), "alibi").save_pretrained(folder)
    assert folder / "README.md" in write_outputs(results, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(folder).position_encoding.config.name == "alibi"
    assert ModelCard.load(folder / "README.md").data.library_name == "transformers"
    copies = tmp_path / "copies"
    assert main([str(tmp_path), "--cards", str(copies)]) == 0
    assert (copies / "tiny-copy-alibi-seed0.md").read_text() == (folder / "README.md").read_text()
    assert (copies / "README.md").exists()


def test_models_that_are_elsewhere_get_no_card_in_the_folder(results, tmp_path):
    assert write_model_cards(results, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
