"""Measurements on the trained models that a study has kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from docs.study import frequencies, kept_models, low_precision, moved_positions
from docs.study.frequencies import frequency_usage
from docs.study.low_precision import precision_rows
from docs.study.moved_positions import divergence_by_position
from hf_posenc import UnsupportedError, patch_model
from tests.fixtures.make import CHECKPOINTS

TOKENS = torch.arange(3, 67).repeat(2, 1)


def trained(scheme: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / scheme, dtype=torch.float32)
    return model


def text(texts: int = 2, length: int = 64) -> Tensor:
    """Bytes of a text as ByT5's tokenizer numbers them."""
    words = Path(__file__).read_bytes()[: texts * length]
    return torch.tensor([3 + byte for byte in words]).view(texts, length)


# Frequencies


def test_shares_follow_the_norms_of_queries_and_keys() -> None:
    model = trained("rope")
    usage = frequency_usage(model, TOKENS)
    assert usage.shape == (2, 4, 8)
    torch.testing.assert_close(usage.sum(-1), torch.ones(2, 4))
    # Pair 5 of head 1 of the second layer: dimensions 5 and 13 of 16.
    with torch.no_grad():
        for row in (16 + 5, 16 + 13):
            model.model.layers[1].self_attn.q_proj.weight[row] *= 3
    changed = frequency_usage(model, TOKENS)
    before = usage[1, 1]
    expected = before.clone()
    expected[5] *= 3
    torch.testing.assert_close(changed[1, 1], expected / expected.sum(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(changed[1, 0], usage[1, 0])


def test_a_scheme_without_rotation_has_no_frequencies() -> None:
    model = trained("alibi")
    with pytest.raises(UnsupportedError, match="no rotation of pairs"):
        frequency_usage(model, TOKENS)
    with pytest.raises(UnsupportedError, match="no rotation of pairs"):
        frequency_usage(patch_model(model, "pope"), TOKENS)


# Positions that move


@pytest.mark.parametrize("scheme", ["rope", "alibi", "none"])
def test_a_relative_scheme_does_not_see_that_all_positions_move(scheme: str) -> None:
    divergence = divergence_by_position(trained(scheme), text())
    # Positions 16 to 61 have a token of the last half of a piece of 32 before the move, the outermost seldom.
    assert divergence.isfinite().nonzero().flatten().tolist() == list(range(23, 55))
    # Divergence is quadratic in the change of logits, which is rounding here: (1e-5)^2, with room.
    assert divergence[23:55].abs().max() < 1e-8


def test_the_divergence_of_an_absolute_scheme_is_that_of_its_logits() -> None:
    model, tokens = trained("learned"), text()
    divergence = divergence_by_position(model, tokens)
    assert divergence[23:55].min() > 1e-4
    pieces, expected = tokens[:, :32], []
    with torch.no_grad():
        logits = [
            model(pieces, position_ids=torch.arange(start, start + 32)[None]).logits.log_softmax(-1)
            for start in range(32)
        ]
    # A token of the last half of a piece is at 54 before the move for every place from 23 to 30.
    for start in range(23, 31):
        before, after = (logits[place][:, 54 - start] for place in (start, start + 1))
        expected.append(torch.nn.functional.kl_div(after, before, reduction="batchmean", log_target=True).item())
    assert divergence[54].item() == pytest.approx(sum(expected) / 8, rel=1e-4)
    # A row of the table that is like no other shows at its place. The last row, which is not trained, does not.
    table = next(value for name, value in model.named_parameters() if "position" in name and value.shape[0] >= 64)
    with torch.no_grad():
        table[63] += 1
        torch.testing.assert_close(divergence_by_position(model, tokens), divergence, equal_nan=True)
        table[54] += 1
    assert divergence_by_position(model, tokens)[54] > 2 * divergence[54]


# Low precision


def test_the_whole_model_and_each_positional_number_are_held_in_low_precision() -> None:
    model = trained("rope")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    rows = precision_rows(model, text()).set_index(["held_in", "position"])
    assert set(rows.index.get_level_values("held_in")) >= {"model bfloat16", "ids bfloat16", "keys int4 after"}
    exact = rows.loc[("model float32", 0), "loss"]
    assert rows.loc[("float32", 512), "loss"] == pytest.approx(exact, abs=1e-4)
    # bfloat16 has one integer in four from 512 on; below 256 it has all.
    assert rows.loc[("ids bfloat16", 0), "change"] == 0
    assert rows.loc[("ids bfloat16", 512), "change"] > 0.1
    assert 0 < abs(rows.loc[("model bfloat16", 0), "change"]) < 0.1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
    assert model.dtype == torch.float32


def test_without_positional_numbers_only_the_whole_model_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    rows = precision_rows(trained("none"), text())
    assert rows.held_in.tolist() == ["model float32", "model bfloat16", "model float16"]
    assert "nothing to round" in capsys.readouterr().err


# The models of a study


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study with two models of rope, one of alibi, and one that is still being written."""
    stream = type("Stream", (), {"tokens": np.arange(3, 2003, dtype=np.int32) % 250 + 3})()
    monkeypatch.setattr(kept_models.Corpus, "open_streams", lambda folder: (stream, stream))
    monkeypatch.setattr(kept_models, "TEXTS", 2)
    folder = tmp_path / "study"
    for name, scheme in (("rope-seed0", "rope"), ("rope-seed1", "rope"), ("a-label-seed0", "alibi")):
        add(folder, name, scheme)
    (folder / "models" / "causal-none-seed0.partial").symlink_to(CHECKPOINTS / "none")
    return folder


def add(folder: Path, name: str, scheme: str) -> None:
    (folder / "models").mkdir(parents=True, exist_ok=True)
    (folder / "models" / f"causal-{name}").symlink_to(CHECKPOINTS / scheme)
    (folder / "trainings" / f"causal-{name}").mkdir(parents=True)
    (folder / "trainings" / f"causal-{name}" / "settings.json").write_text('{"train_length": 64}')


@pytest.mark.parametrize(
    ("main", "schemes", "rows"),
    [
        (frequencies.main, {"rope"}, 2 * 4 * 8),
        (moved_positions.main, {"rope", "a-label"}, 32),
        (low_precision.main, {"rope", "a-label"}, None),
    ],
)
def test_the_models_of_a_study_are_measured(
    study: Path, main: Callable[[list[str]], int], schemes: set[str], rows: int | None
) -> None:
    assert main([str(study), "--output", str(study / "out.csv")]) == 0
    frame = pd.read_csv(study / "out.csv")
    assert set(frame.scheme) == schemes
    assert set(frame[frame.scheme == "rope"].seed) == {0, 1}
    if rows is not None:
        assert set(frame.groupby(["scheme", "seed"]).size()) == {rows}


def test_labels_and_seeds_choose_models(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(study), "--output", str(study / "out.csv")]
    assert frequencies.main([*words, "--schemes", "a-label"]) == 2
    said = capsys.readouterr().err
    assert "causal-a-label-seed0 is left out: LlamaForCausalLM has no rotation of pairs" in said
    assert "applies to none of these models" in said
    assert not (study / "out.csv").exists()
    assert frequencies.main([*words, "--schemes", "rope", "--seeds", "1"]) == 0
    assert set(pd.read_csv(study / "out.csv").seed) == {1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schemes", "rope", "typo"], "--schemes typo: there are models of a-label, rope"),
        (["--seeds", "7"], "--seeds 7: there are models of 0, 1"),
        (["missing"], "missing has no trained causal model; run the study with --save_models"),
        (["other"], "causal-rope-seed0 is in study and in other"),
        (["--output", "no/such/folder.csv"], "The folder of --output no/such/folder.csv does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(study.parent)
    monkeypatch.setattr(kept_models.KeptModel, "load", lambda self: pytest.fail("A model was loaded."))
    add(Path("other"), "rope-seed0", "rope")
    assert frequencies.main(["study", *words, *([] if "--output" in words else ["--output", "out.csv"])]) == 2
    assert message in capsys.readouterr().err
