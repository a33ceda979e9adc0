"""The studies of docs/study/protocol.md: their settings agree with the protocol."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from docs.study.claims import read_runs
from hf_posenc import LocalGlobalConfig, NoneConfig, RopeConfig, patch_model
from training.errors import SettingsError
from training.study.cells import study_cells
from training.study.corpus import study_tokenizer
from training.study.models import new_model
from training.study.rates import losses_by_rate, rates_study, with_chosen_rates
from training.study.settings import StudySettings, parse_study

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = (ROOT / "docs" / "study" / "protocol.md").read_text(encoding="utf-8")
NAMES = ("reference", "reference_catalogue", "reference_tasks", "reference_masked")


def study_of(name: str, *words: str) -> StudySettings:
    assert f"`docs/study/settings/{name}.yaml` |" in PROTOCOL
    return parse_study([str(ROOT / "docs" / "study" / "settings" / f"{name}.yaml"), *words], "")


@pytest.mark.parametrize("name", NAMES)
def test_the_protocol_names_the_study_and_its_settings(name: str) -> None:
    study = study_of(name)
    assert study_cells(study)
    assert study.learning_rates == [1e-3, 2e-3, 4e-3, 8e-3]
    causal = name in ("reference", "reference_catalogue")
    assert study.rate_settings == {"max_steps": 500 if causal else 1000}
    assert "500 steps for causal models, and 1,000 for masked ones and algorithms" in PROTOCOL
    steps = 1000 if name == "reference_tasks" else 2000
    assert study.max_steps == steps
    assert f"{steps:,} steps" in PROTOCOL
    row = next(line for line in PROTOCOL.splitlines() if f"`docs/study/settings/{name}.yaml` |" in line)
    assert re.search(rf" 0 to {study.seeds[-1]} \|", row) or study.seeds == [0]


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_the_seeds_has_the_same_learning_rates(name: str) -> None:
    study = study_of(name)
    seeds = rates_study(study).seeds
    assert rates_study(study_of(name, "--seeds=0")).seeds == seeds
    assert not set(seeds) & set(study.seeds)
    with pytest.raises(SettingsError, match="is one of the seeds"):
        study_of(name, f"--seeds={seeds[0]}")


def test_the_study_of_swaps_has_a_control_for_each_learning_rate() -> None:
    study = study_of("reference_heal")
    healed = {label: options for label, options in study.scheme_options.items() if options.start == "rope"}
    assert healed.keys() == set(study.schemes) - {"rope"}
    for speed in ("slow", "fast"):
        of_speed = {label: options.training for label, options in healed.items() if label.endswith(speed)}
        assert all(training == of_speed[f"rope-{speed}"] for training in of_speed.values())
        # 12 % of the steps, as in DroPE.
        assert of_speed[f"rope-{speed}"]["max_steps"] == 0.12 * study.max_steps


def test_the_swaps_of_a_pretrained_model_have_the_tokens_and_the_control_that_the_protocol_says() -> None:
    study = study_of("reference_heal_smollm2", "--model_name_or_path=anything")
    assert f"{study.max_steps} steps of {study.batch_size * study.train_length} tokens" in PROTOCOL
    cells = study_cells(study)
    assert [cell.label for cell in cells if cell.config is None] == ["native"] * len(study.seeds)
    assert {cell.settings.learning_rate for cell in cells} == {1e-4}


def test_layers_without_a_window_have_no_positions_in_the_study_of_windows() -> None:
    study = study_of("reference_windows")
    cells = {cell.label: cell for cell in study_cells(study) if cell.seed == 0}
    model = new_model(cells["native"].task, study.changed({}, ""), study_tokenizer(study), positions=128)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert 2 * model.config.sliding_window == study.train_length
    config = cells["local_global"].config
    assert isinstance(config, LocalGlobalConfig)
    patch_model(model, config)
    assert [config.for_layer(index, kind) for index, kind in enumerate(model.config.layer_types)] == [
        RopeConfig(), NoneConfig()
    ]  # fmt: skip


def test_the_rerun_repeats_cells_of_the_main_study_with_a_new_seed() -> None:
    rerun, control, main = (study_of(f"reference{name}") for name in ("_rerun", "_control", ""))
    schemes = re.search(r"none, sinusoidal, [a-z_0-9, ]+pope", PROTOCOL)[0].split(", ")
    assert rerun.schemes == random.Random(0).sample(schemes, 3)
    assert not set(rerun.seeds) & {*main.seeds, main.rate_seed}
    rates = read_runs(ROOT / "docs" / "study" / "runs")["reference_rates"]
    losses = losses_by_rate(rates)
    best = {
        scheme: min(main.learning_rates, key=lambda rate: losses["causal", f"{scheme}-{rate:g}"]) for scheme in schemes
    }
    cells = study_cells(with_chosen_rates(main, {"runs": rates}))
    chosen = {cell.label: cell.settings for cell in cells if cell.seed == 0}
    assert control.seeds == main.seeds[:1]
    for cell in (*study_cells(rerun), *study_cells(control)):
        assert cell.settings.learning_rate == best[cell.label]
        assert cell.settings == chosen[cell.label]


def test_the_catalogue_has_the_number_of_schemes_that_the_protocol_says() -> None:
    catalogue, main = study_of("reference_catalogue"), study_of("reference")
    assert f"{len(catalogue.schemes)} further schemes" in PROTOCOL
    assert not set(catalogue.schemes) & set(main.schemes)
    for name in re.findall(r"none, sinusoidal, [a-z_0-9, ]+pope", PROTOCOL):
        assert set(name.split(", ")) <= set(main.schemes)


def test_the_encoder_decoders_are_those_of_the_protocol() -> None:
    study = study_of("reference_marian")
    assert study.rate_seed not in study.seeds
    assert all(cell.task.encoder_decoder for cell in study_cells(study))
