"""The model cards of a study: what they say, that the hub reads them, and that they lie beside the models."""

from __future__ import annotations

import math
import re

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from docs.study.outputs import copy_cards, main
from hf_posenc import patch_model
from tests.models import tiny
from tests.training.study_results import LENGTHS, finished, row, study, three_seeds
from training.report.cards import study_cards
from training.report.outputs import write_outputs
from training.report.records import study_records
from training.report.results import check_results

pytestmark = pytest.mark.usefixtures("no_figures")


def cards(results):
    checked = check_results(results)
    return {card.name: ModelCard(card.text) for card in study_cards(checked, study_records(checked))}


def with_models(results):
    for run in results["runs"]:
        if run["status"] == "finished":
            run["model"] = f"models/{run['task']}-{run['scheme']}-seed{run['seed']}"
    return results


def test_there_is_a_card_for_every_scheme_that_saved_a_model_and_no_other():
    results = with_models(three_seeds())
    saved = {(run["task"], run["scheme"]) for run in results["runs"] if run["status"] == "finished"}
    assert set(cards(results)) == {f"tiny-{task}-{scheme}" for task, scheme in saved}
    assert cards(three_seeds()) == {}


def test_the_hub_reads_every_result_back(tmp_path):
    results = with_models(three_seeds())
    copy_cards(check_results(results), tmp_path / "cards")
    card = ModelCard.load(tmp_path / "cards" / "tiny-causal-rope-500k.md", ignore_metadata_errors=False)
    reported = {(score.metric_type, score.metric_name): score.metric_value for score in card.data.eval_results}
    losses = [[base + seed / 8 for seed in range(3)] for base in (2.5, 2.75, 3.0)]
    expected = {
        ("loss", f"Loss at {n} tokens"): sum(values) / 3 for n, values in zip(LENGTHS, losses, strict=True)
    } | {
        ("perplexity", f"Perplexity at {n} tokens"): round(sum(map(math.exp, values)) / 3, 4)
        for n, values in zip(LENGTHS, losses, strict=True)
    }  # fmt: skip
    assert reported == expected
    assert {score.metric_args["seeds"] for score in card.data.eval_results} == {3}
    assert {score.dataset_type for score in card.data.eval_results} == {"sotu"}
    assert (card.data.pipeline_tag, card.data.license, card.data.language) == ("text-generation", "apache-2.0", "en")
    assert card.data.tags == ["hf_posenc", "position-encoding", "rope", "causal"]
    masked = ModelCard.load(tmp_path / "cards" / "tiny-masked-none.md").data
    assert {score.task_type for score in masked.eval_results} == {"fill-mask"}
    copied = ModelCard.load(tmp_path / "cards" / "tiny-copy-native.md").data
    assert [score.metric_value for score in copied.eval_results] == [1.0, 1.0, 0.375, 0.0]
    other = study([finished("copy", "rope", model="models/x")], name="other")
    copy_cards(check_results(other), tmp_path / "cards")
    index = (tmp_path / "cards" / "README.md").read_text()
    assert all(f"[{name}]({name}.md)" in index for name in ("other-copy-rope", "tiny-masked-none"))


def test_a_card_says_how_to_repeat_and_load_the_models_and_what_they_do_beside_the_control():
    texts = cards(with_models(three_seeds()))
    text = texts["tiny-causal-rope-500k"].text
    for part in (
        "python training/compare.py training/studies/tiny.yaml",
        '"theta": 500000.0',
        "seed 0, 1, 2",
        "| trained parameters | 1,234 |",
        "import hf_posenc  # before from_pretrained",
        'LlamaForCausalLM.from_pretrained("models/causal-rope-500k-seed0")',
        "`models/causal-rope-500k-seed2`",
        "works of the United States government",
        "1bd1c416b61b8f77",
        "Careful.",
        "`native` is the control.",
        "- transformers 5.23.0",
    ):
        assert part in text
    assert row(text, "rope-500k")[1:3] == ["3", "2.625 ± 0.311"]
    assert row(text, "native")[1:3] == ["3", "2.625 ± 0.311"]
    control = texts["tiny-causal-native"].text
    assert "import hf_posenc" not in control
    assert "These models are the control" in control


def test_a_card_is_plain_markdown_without_leftovers():
    longer = {"max_steps": 20, "train_length": 64, "learning_rate": 0.1}
    healed = finished("causal", "p_rope", model="models/b", training=longer) | {"from": "rope-500k"}
    results = with_models(three_seeds())
    texts = cards(results | {"runs": [*results["runs"], healed]})
    for card in texts.values():
        assert not re.search(r"\{\{|\{%|None|\n\n\n", card.content)
        for block in re.findall(r"(?:^\|.*\n)+", card.text, flags=re.M):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    text = texts["tiny-causal-p_rope"].text
    for line in (
        "starts from | `rope-500k` of",
        "| train_length | 64 |",
        "| learning_rate | 0.1 |",
        "| batch_size | 4 |",
    ):
        assert line in text


def test_a_loss_that_is_no_number_is_no_result_and_other_text_has_an_unknown_licence():
    run = finished("causal", "rope", model="models/a")
    run["by_length"]["loss"] = [2.5, 800.0, None]
    results = study([run])
    results["corpus"]["source"] = "notes.txt"
    (card,) = cards(results).values()
    assert [score.metric_name for score in card.data.eval_results] == [
        "Loss at 16 tokens", "Perplexity at 16 tokens", "Loss at 32 tokens",
    ]  # fmt: skip
    assert "licence of this text is not recorded" in card.text
    assert "government" not in card.text
    assert (card.data.language, card.data.license) == (None, None)
    assert "not useful" not in card.text
    assert "fixtures" not in card.text
    assert ", trained to predict the next token (seed 0). They\nwere trained to compare" in card.text


def test_a_card_lies_beside_a_model_that_loads_with_it(tmp_path):
    results = study([finished("copy", "alibi", model="models/copy-alibi-seed0")])
    folder = tmp_path / "models" / "copy-alibi-seed0"
    patch_model(tiny("LlamaForCausalLM"), "alibi").save_pretrained(folder)
    assert folder / "README.md" in write_outputs(results, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(folder).position_encoding.config.name == "alibi"
    assert ModelCard.load(folder / "README.md").data.library_name == "transformers"
    assert main([str(tmp_path), "--cards", str(tmp_path / "copies")]) == 0
    assert (tmp_path / "copies" / "tiny-copy-alibi.md").read_text() == (folder / "README.md").read_text()
