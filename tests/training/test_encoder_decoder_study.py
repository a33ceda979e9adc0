"""Studies of encoder-decoders: the encoder reads the prompt of a synthetic task, and the decoder writes the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from training.compare import compare
from training.study.cells import study_cells
from training.study.corpus import study_tokenizer
from training.study.models import new_model
from training.study.settings import StudySettings, validated


def study_of(folder: Path, model_type: str, **changes: Any) -> StudySettings:
    given = {
        "tasks": ["repeated_copy"], "model_type": model_type, "schemes": ["native", "rope"], "max_steps": 12,
        "eval_every": 6, "hidden_size": 32, "learning_rate": 1e-2, "output_dir": str(folder), "workers": 1,
        "test_lengths": [4, 12], "test_samples": 8, "save_models": True,
    }  # fmt: skip
    given = {name: value for name, value in (given | changes).items() if value is not None}
    return validated(StudySettings, given, "The study")


@pytest.mark.long
@pytest.mark.parametrize(("model_type", "name"), [("marian", "MarianMTModel"), ("t5", "T5ForConditionalGeneration")])
def test_an_encoder_decoder_learns_a_synthetic_task(model_type: str, name: str, tmp_path: Path) -> None:
    results = compare(study_of(tmp_path, model_type), [])
    assert results["tasks"]["repeated_copy"]["model"] == name
    losses = {}
    for run in results["runs"]:
        assert run["status"] == "finished"
        assert run["exact_match"]["lengths"] == [4, 12]
        first, last = run["curve"]["validation_loss"]
        assert last < first
        losses[run["scheme"]] = last
    # Another position encoding, from the same weights and on the same batches.
    assert losses["native"] != losses["rope"]
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / results["runs"][1]["model"])
    assert type(model).__name__.endswith(name)
    # In the encoder and in the decoder.
    assert len(model.position_encoding.report.stacks) == 2


def test_the_loss_of_a_study_is_that_of_the_class_itself(tmp_path: Path) -> None:
    """transformers computes the same mean loss from the labels of the validation rows."""
    study = study_of(tmp_path, "marian", schemes=["native"], max_steps=2, eval_every=2, learning_rate=1e-9)
    (cell,), tokenizer = study_cells(study), study_tokenizer(study)
    data = cell.task.data(cell, tokenizer)
    (run,) = compare(study, [])["runs"]
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / run["model"]).eval()
    with torch.no_grad():
        loss = model(**data.collate([data.validation[index] for index in range(len(data.validation))])).loss
    assert run["curve"]["validation_loss"][-1] == pytest.approx(float(loss), abs=1e-4)


def test_sizes_are_those_of_the_study_on_both_sides(tmp_path: Path) -> None:
    study = study_of(tmp_path, "bart", num_layers=3, num_heads=2)
    (cell, *_), tokenizer = study_cells(study), study_tokenizer(study)
    config = new_model(cell.task, cell.settings, tokenizer, 50).config
    assert config.encoder_layers == config.decoder_layers == 3
    assert config.encoder_attention_heads == config.decoder_attention_heads == 2
    assert config.d_model == 32
    assert config.encoder_ffn_dim == config.decoder_ffn_dim == 64
    assert config.dropout == config.attention_dropout == 0
    # Not the padding token, which some decoders mask.
    assert config.decoder_start_token_id == tokenizer.eos_token_id


def test_text_is_still_read_by_a_decoder_alone(tmp_path: Path) -> None:
    study = study_of(tmp_path, "marian", tasks=["causal"], test_lengths=[], test_samples=None)
    (cell, *_) = study_cells(study)
    assert not cell.task.encoder_decoder
    model = new_model(cell.task, cell.settings, study_tokenizer(study), 50)
    assert type(model).__name__ == "MarianForCausalLM"
