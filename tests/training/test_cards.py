"""Model cards of a study: what they say, whether the hub's own classes read them back, and a model beside one."""

from __future__ import annotations

import math
import re

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_posenc import patch_model
from tests.training.study_results import LENGTHS, finished, study, three_seeds
from training.study import cards as card_files
from training.study.cards import format_index, write_model_cards
from training.study.outputs import main, write_outputs
from training.study.records import study_records
from training.study.results import ResultsError, check_results


def study_cards(results):
    checked = check_results(results)
    return card_files.study_cards(checked, study_records(checked))


def write_cards(results, folder):
    return card_files.write_cards(study_cards(results), folder)


def texts(results):
    return [card.card.text for card in study_cards(results)]


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
    return {card.name: card.card for card in study_cards(results)}


def test_there_is_a_card_for_every_scheme_that_saved_a_model_and_no_other(results, cards):
    saved = {(run["task"], run["scheme"]) for run in results["runs"] if run["status"] == "finished"}
    assert set(cards) == {f"tiny-{task}-{scheme}" for task, scheme in saved}
    assert study_cards(three_seeds()) == []


def test_the_hub_reads_every_result_back(results, tmp_path):
    written = write_cards(results, tmp_path)
    assert len(written) == len(study_cards(results)) + 1
    card = ModelCard.load(tmp_path / "tiny-causal-rope-500k.md", ignore_metadata_errors=False)
    card.data.to_yaml()
    assert card.data.model_name == "tiny-causal-rope-500k"
    found = {(score.metric_type, score.metric_name): score.metric_value for score in card.data.eval_results}
    losses = [[base + seed / 8 for seed in range(3)] for base in (2.5, 2.75, 3.0)]
    expected = {
        ("loss", f"Loss at {n} tokens"): sum(values) / 3 for n, values in zip(LENGTHS, losses, strict=True)
    } | {
        ("perplexity", f"Perplexity at {n} tokens"): round(sum(map(math.exp, values)) / 3, 4)
        for n, values in zip(LENGTHS, losses, strict=True)
    }  # fmt: skip
    assert found == expected
    assert {score.metric_args["seeds"] for score in card.data.eval_results} == {3}
    assert {score.dataset_type for score in card.data.eval_results} == {"sotu"}
    assert (card.data.pipeline_tag, card.data.license, card.data.language) == ("text-generation", "apache-2.0", "en")
    assert card.data.tags == ["hf_posenc", "position-encoding", "rope", "causal"]
    masked = ModelCard.load(tmp_path / "tiny-masked-none.md").data
    assert {score.task_type for score in masked.eval_results} == {"fill-mask"}
    copied = ModelCard.load(tmp_path / "tiny-copy-native.md").data
    assert [score.metric_value for score in copied.eval_results] == [1.0, 1.0, 0.375, 0.0]
    assert {score.metric_type for score in copied.eval_results} == {"exact_match"}


def test_a_card_says_how_to_repeat_and_load_the_models(cards):
    text = cards["tiny-causal-rope-500k"].text
    for part in (
        "python training/compare.py training/studies/tiny.yaml",
        '"theta": 500000.0',
        "one model for each of the seeds 0, 1, 2",
        "1,234 parameters",
        "import hf_posenc  # before from_pretrained",
        'LlamaForCausalLM.from_pretrained("models/causal-rope-500k-seed0")',
        "`models/causal-rope-500k-seed2`",
        "works of the United States government",
        "MIT licence",
        "1bd1c416b61b8f77",
        "- Careful.",
        "## Intended use",
        "## Limits",
        "- transformers 5.23.0",
        "wall time by seed | 6 s, 7 s, 8 s |",
    ):
        assert part in text
    control = cards["tiny-causal-native"].text
    assert "import hf_posenc" not in control
    assert "this is the control" in control


def test_the_mean_of_the_seeds_stands_beside_the_control(cards):
    text = cards["tiny-causal-rope-500k"].text
    line = next(line for line in text.splitlines() if line.startswith("|     16 "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["16", "2.625 ± 0.311", "2.625 ± 0.311"]
    assert cells[3].startswith("13.88 ± ")
    assert "Means over the seeds 0, 1, 2" in text
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
    (card,) = (found.card for found in study_cards(study([run])))
    assert [score.metric_name for score in card.data.eval_results] == [
        "Loss at 16 tokens", "Perplexity at 16 tokens", "Loss at 32 tokens",
    ]  # fmt: skip
    assert "One seed: differences" in card.text


def test_other_text_has_an_unknown_licence_and_language():
    results = study([finished("causal", "rope", model="models/a")])
    results["corpus"]["source"] = "notes.txt"
    (card,) = (found.card for found in study_cards(results))
    assert "does not know the licence" in card.text
    assert "government" not in card.text
    assert card.data.language is None
    results["corpus"] = None
    with pytest.raises(ResultsError, match="the results have no corpus"):
        study_cards(results)


def test_processes_are_told_where_there_were_several():
    alone, shared = (finished("causal", "rope", seed=seed, model=f"models/{seed}") for seed in (0, 1))
    shared["processes"] = 2
    (text,) = texts(study([alone, shared]))
    assert "a processor, 1 thread(s) or 2 processes of 1 thread(s)" in text


def test_models_from_other_ones_say_so():
    longer = {"max_steps": 20, "train_length": 64, "learning_rate": 0.1}
    healed = finished("causal", "alibi", model="models/b", training=longer) | {"from": "rope"}
    (text,) = texts(study([finished("causal", "rope"), healed]))
    assert "Trained further from the model `rope` of the same study, which was trained to predict" in text
    assert "`alibi` starts from the trained `rope` of the same seed, trained for 20 steps more." in text
    assert "| tokens per sequence | 64 |" in text
    assert "| learning_rate | 0.1 |" in text
    assert "| sequences per step | 4 |" in text


def test_a_model_from_another_one_counts_the_training_of_both():
    first = finished("causal", "rope")
    own = {"config": first["config"], "from": "rope"}
    longer = finished("causal", "longer", config=None, model="models/b", training={"train_length": 64}) | own
    read = finished("causal", "read", config=None, model="models/c", training={"max_steps": 0}) | own
    read["curve"] = {"step": [0], "train_loss": [], "validation_loss": [2.0]}
    results = study([first, longer, read])
    results["tasks"]["causal"] = results["tasks"]["causal"] | {"learning_rate": 0.002}
    trained, untrained = texts(results)
    assert "Trained on 16, then 64 tokens" in trained
    assert "longer than the 64 tokens of training" in trained
    assert "40 steps of training" in trained
    assert "| learning_rate | 0.002 |" in trained
    assert "| steps | 0: the weights are those of `rope` |" in untrained
    assert "sequences per step" not in untrained
    assert "Trained on 16 tokens" in untrained
    assert "20 steps of training" in untrained


def test_the_mask_tells_dogs_apart_where_no_position_does():
    run = finished("causal", "none", model="models/a", dog={"layers": [0.0, 0.5], "probe": 0.0, "told_apart": False})
    (text,) = texts(study([run]))
    assert "does not tell the two dogs apart" in text
    assert "0.5 (relative L2), which the causal mask alone makes." in text


def test_the_index_lists_cards_of_every_study_in_the_folder(results, tmp_path):
    write_cards(results, tmp_path)
    other = study([finished("copy", "rope", model="models/copy-rope-seed0")], name="other")
    write_cards(other, tmp_path)
    index = (tmp_path / "README.md").read_text()
    assert index == format_index(tmp_path)
    assert "[other-copy-rope](other-copy-rope.md)" in index
    assert "[tiny-masked-none](tiny-masked-none.md)" in index
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
    assert (copies / "tiny-copy-alibi.md").read_text() == (folder / "README.md").read_text()
    assert (copies / "README.md").exists()


def test_models_that_are_elsewhere_get_no_card_in_the_folder(results, tmp_path):
    assert write_model_cards(study_cards(results), tmp_path) == []
    assert list(tmp_path.iterdir()) == []
