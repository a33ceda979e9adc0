from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from hf_posenc import AlibiConfig, ComposedConfig, NativeConfig, RopeConfig, SinusoidalConfig, UnknownNameError
from training import compare
from training.errors import SettingsError
from training.objectives import IGNORED
from training.study.cells import study_cells
from training.study.corpus import study_tokenizer
from training.study.settings import StudySettings, parse_numbers, parse_study, validated
from training.study.tasks import algorithms


def settings(**options):
    """As `parse_study` makes them, where every value has the type that YAML gives it."""
    return validated(StudySettings, options, "The study")


def test_every_import_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert parse_study(["--import", "json", "--import=math,cmath"], "").imports == ["json", "math", "cmath"]


def test_a_label_of_several_schemes() -> None:
    both = settings(schemes="both", scheme_options={"both": {"scheme": ["native", "alibi"]}})
    (cell,) = study_cells(both.model_copy(update={"tasks": ["causal"]}))
    assert cell.config == ComposedConfig((NativeConfig(), AlibiConfig()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "causal,maskd"}, "Unknown task 'maskd'.*Did you mean 'masked'"),
        ({"schemes": "none,sinusodal"}, "Did you mean 'sinusoidal'"),
        ({"schemes": "rope", "scheme_options": {"rope": {"teta": 1.0}}}, "theta"),
        ({"schemes": "rope", "scheme_options": {"rope": {"theta": -1.0}}}, "theta is -1"),
        ({"schemes": ","}, "at least 1 item"),
        ({"scheme_options": [1]}, "valid dictionary"),
        ({"scheme_options": {"rope": 3}}, "valid dictionary"),
        ({"schemes": "none", "scheme_options": {"rope": {}}}, "--scheme_options names 'rope'; the study has none"),
        ({"tasks": "causal", "task_options": {"masked": {}}}, "--task_options names 'masked'"),
        ({"tasks": "copy", "task_options": {"copy": {"schemes": []}}}, "at least 1 item"),
        ({"max_step": 3}, "Did you mean 'max_steps'"),
        ({"task_options": {"causal": {"max_step": 3}}}, "Task 'causal'.*Did you mean 'max_steps'"),
        ({"task_options": {"causal": {"max_steps": "3"}}}, "--max_steps is '3'; expected a valid integer"),
        ({"task_options": {"causal": {"schemes": ["xpos"]}}}, "Task 'causal' names 'xpos'"),
        ({"schemes": "none", "scheme_options": {"none": {"training": {"max_steps": 0}}}}, "nothing to evaluate"),
        ({"schemes": "none", "scheme_options": {"none": {"from": "rope"}}}, "--schemes must include"),
        (
            {"schemes": "a,b", "scheme_options": {"a": {"scheme": "none", "from": "b"},
                                                  "b": {"scheme": "none", "from": "a"}}},
            "no training could begin",
        ),
        (
            {"schemes": "rope,a",
             "scheme_options": {"a": {"scheme": "rope", "from": "rope", "training": {"num_layers": 3}}}},
            "num_layers, which a single scheme",
        ),
        ({"schemes": "native", "scheme_options": {"native": {"theta": 3}}}, "it has no options"),
        ({"schemes": "none", "scheme_options": {"none": {"training": {"eval_windows": 3}}}}, "which a single"),
        (
            {"tasks": "copy", "schemes": "none", "scheme_options": {"none": {"training": {"train_length": 64}}}},
            "train_length, which its training does not use: it is for causal",
        ),
        (
            {"tasks": "causal", "schemes": "rope",
             "scheme_options": {"rope": {"training": {"config_overrides": {"attention_bias": True}}}}},
            "training has config_overrides",
        ),
        ({"tasks": "causal", "pose_length": 64}, "--pose_length is given, but no task.*it is for embedding"),
        ({"tasks": "causal", "test_samples": 3}, "--test_samples is given, but no task.*it is for synthetic"),
        ({"tasks": "copy", "eval_windows": 3}, "it is for causal, masked, embedding"),
        ({"tasks": "copy,sorting", "dataset_name": "x"}, "it is for causal, masked, embedding, images"),
        ({"tasks": "images", "tokenizer_name": "x"}, "it is for causal, masked, embedding, synthetic"),
        ({"tasks": "causal", "test_lengths": "8,16", "length_factor": 2}, "test_lengths replaces it"),
        (
            {"schemes": "rope,a",
             "scheme_options": {"a": {"scheme": "rope", "from": "rope",
                                      "training": {"max_steps": 0, "learning_rate": 1e-3}}}},
            "learning_rate, but max_steps is 0",
        ),
        ({"trainer": {"num_train_epochs": 3}}, "trainer has 'num_train_epochs'"),
        ({"tasks": "copy", "task_options": {"copy": {"train_length": 8}}}, "train_length, which its training runs"),
        ({"schemes": "../none", "scheme_options": {"../none": {"scheme": "none"}}}, "String should match pattern"),
        ({"seeds": "0,-1"}, "whole numbers"),
        ({"max_steps": -1}, "--max_steps is -1; expected greater than or equal to 0"),
        ({"length_factor": 3}, "power of two"),
        ({"hidden_size": 20, "num_heads": 4}, "heads of 5 dimensions"),
        ({"mlm_probability": 1.0}, "less than 1"),
        ({"test_lengths": "5-"}, "give whole numbers and ranges"),
        ({"train_lengths": "5-3"}, "not ascending"),
        ({"train_lengths": "2000000"}, "less than or equal to 1000000"),
        ({"seeds": "0-2000000"}, "has more than"),
        ({"seeds": "5000000000"}, "less than or equal to 4294967295"),
        ({"task_options": {"causal": {"lora_r": 3}}}, "Unknown setting 'lora_r'.*listed by --help"),
        ({"trainer": {"learning_rat": 3}}, "Did you mean 'learning_rate'"),
        ({"trainer": {"seed": 3}}, "but the study has a setting for it"),
        ({"tasks": "embedding"}, "give --model_name_or_path"),
        ({"model_name_or_path": "x", "hidden_size": 64}, "--hidden_size is given.*the models are that of"),
        ({"model_name_or_path": "x", "train_length": 4}, "at least 8 tokens"),
        # How a trained model takes over
        ({"schemes": "none", "scheme_options": {"none": {"swap": {"lora": True}}}}, "new weights"),
        *(
            ({"model_name_or_path": "x", "schemes": "alibi", "scheme_options": {"alibi": {"swap": swap}}}, message)
            for swap, message in (
                ({"gradual_step": 3}, "Did you mean 'gradual_steps'"),
                ({"gradual_steps": -1}, "gradual_steps is -1"),
                ({"gradual_steps": "many"}, "valid integer"),
                ({"gradual_steps": 2000}, "the old scheme still has a share"),
                ({"gradual_steps": 3, "lora": True}, "lora cannot follow"),
                ({"distill_weight": 0.3}, "without --distill"),
                ({"distill": True, "distill_weight": 1.5}, r"distill_weight is 1\.5"),
                ({"distill": True, "distill_temperature": 0.0}, "distill_temperature is 0"),
                ({"table_extension": "last"}, "without --initialization"),
                ({"initialization": "fited"}, "choose from auto, fitted, default"),
            )
        ),
        (
            {"model_name_or_path": "x", "schemes": "native",
             "scheme_options": {"native": {"swap": {"gradual_steps": 1}}}},
            "cannot be a swap",
        ),
        (
            {"model_name_or_path": "x", "tasks": "embedding", "schemes": "none",
             "scheme_options": {"none": {"swap": {"distill": True}}}},
            "always has a teacher",
        ),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_says_why(options, message):
    with pytest.raises((SettingsError, UnknownNameError), match=message):
        study_cells(settings(**options))


def test_a_wrong_command_line_leaves_no_output_folder(tmp_path, capsys):
    out = tmp_path / "out"
    assert compare.main(["--schemes=allibi", f"--output_dir={out}"]) == 2
    assert "Did you mean 'alibi'" in capsys.readouterr().err
    assert compare.main([str(tmp_path / "absent.yaml"), f"--output_dir={out}"]) == 2
    assert "Cannot read the settings" in capsys.readouterr().err
    assert not out.exists()


def test_lengths():
    settings = StudySettings(train_length=24, length_factor=4)
    assert settings.lengths == [24, 48, 96]
    assert parse_numbers("5, 1-3,2") == parse_numbers([5, "1-3"]) == [1, 2, 3, 5]
    # A date, as a seed.
    assert StudySettings(seeds="20260101").seeds == [20260101]
    assert StudySettings(test_lengths=[64, 16]).lengths == [16, 64]


def test_tasks_and_schemes_have_settings_of_their_own():
    study = StudySettings(
        schemes="rope,stretched",
        scheme_options={"stretched": {"scheme": "rope", "theta": 500.0, "from": "rope", "training": {"max_steps": 7}}},
        tasks="causal,copy",
        task_options={"causal": {"max_steps": 50, "seeds": [1, 2]}, "copy": {"schemes": ["rope"]}},
        max_steps=90,
    )
    cells = {cell.name: cell for cell in study_cells(study)}
    assert list(cells) == [
        "copy-rope-seed0", "causal-rope-seed1", "causal-stretched-seed1", "causal-rope-seed2", "causal-stretched-seed2",
    ]  # fmt: skip
    assert cells["causal-rope-seed1"].settings.max_steps == 50
    assert cells["copy-rope-seed0"].settings.max_steps == 90
    stretched = cells["causal-stretched-seed2"]
    assert stretched.settings.max_steps == 7
    assert stretched.config == RopeConfig(theta=500.0)
    assert stretched.start is cells["causal-rope-seed2"]
    assert stretched.start.is_start
    assert not stretched.is_start


def test_what_a_scheme_starts_from_is_run_too():
    study = StudySettings(
        schemes="none,rope,tuned",
        scheme_options={"tuned": {"scheme": "rope", "from": "rope"}},
        tasks="causal",
        task_options={"causal": {"schemes": ["tuned"]}},
    )
    assert [cell.label for cell in study_cells(study)] == ["rope", "tuned"]


def test_sinusoids_have_the_size_of_the_tokens_unless_somebody_says_otherwise():
    by_default, by_hand = (
        study_cells(StudySettings(schemes="sinusoidal", scheme_options=options))[0].config
        for options in ({}, {"sinusoidal": {"scale": 1.0}})
    )
    assert by_default == SinusoidalConfig(scale=0.07)
    assert by_hand == SinusoidalConfig(scale=1.0)


def test_a_yaml_file_says_what_flags_say_and_flags_come_after_it(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(
        "schemes: [none, rope]\nscheme_options: {rope: {theta: 500.0}}\nseeds: [0, 1]\nlearning_rate: 1e-3\n"
        "task_options:\n  causal: {max_steps: 3}\nsave_models: true\n"
    )
    from_file = parse_study([str(path), "--max_steps=9", "--seeds=4"], "")
    from_flags = StudySettings(
        schemes="none,rope", scheme_options={"rope": {"theta": 500.0}}, seeds="4", learning_rate=1e-3,
        task_options={"causal": {"max_steps": 3}}, save_models=True, max_steps=9,
    )  # fmt: skip
    assert from_file.model_dump() == from_flags.model_dump()
    words = ["--schemes=none,rope", "--scheme_options={rope: {theta: 5e2}}", "--seeds", "4", "--learning_rate=1e-3"]
    words += ['--task_options={"causal": {"max_steps": 3}}', "--save_models", "--max_steps=9", "--dataset_name=2024"]
    assert parse_study(words, "") == from_flags.model_copy(update={"dataset_name": "2024"})


def test_flags_choose_a_part_of_a_file_with_its_options(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(
        "schemes: [rope, t5, ntk]\ntasks: [copy, parity]\n"
        "scheme_options: {t5: {max_distance: 11}, ntk: {scheme: rope, theta: 500.0}}\n"
        "task_options: {copy: {seeds: [0, 1], schemes: [rope, t5], scheme_options: {t5: {num_buckets: 8}}}, "
        "parity: {max_steps: 5}}\n"
    )
    part = parse_study([str(path), "--schemes=rope", "--tasks=copy"], "")
    assert (part.scheme_options, list(part.task_options)) == ({}, ["copy"])
    assert [cell.name for cell in study_cells(part)] == ["copy-rope-seed0", "copy-rope-seed1"]
    whole = {cell.name: cell for cell in study_cells(parse_study([str(path)], ""))}
    assert whole["copy-rope-seed0"].identity({}) == study_cells(part)[0].identity({})
    assert whole["copy-t5-seed0"].options == {"max_distance": 11, "num_buckets": 8}
    assert whole["parity-t5-seed0"].options == {"max_distance": 11}
    # A task with none of the schemes is left out, and is not run with all of them.
    assert {cell.task.name for cell in study_cells(parse_study([str(path), "--schemes=ntk"], ""))} == {"parity"}
    # What flags say comes after the file, also of a scheme that is not in it.
    words = ["--schemes=kerple", "--scheme_options={kerple: {per_head: true}}", "--learning_rates=[1e-3]"]
    more = parse_study([str(path), *words, "--tasks=parity"], "")
    assert list(more.scheme_options) == ["kerple"]
    # A name that is nowhere in the file stays a mistake.
    with pytest.raises(SettingsError, match="names 't6'"):
        parse_study([str(path), "--schemes=rope", "--scheme_options={t6: {}}"], "")
    # What is for the other part of the file is no mistake. A flag that changes nothing is one.
    path.write_text("tasks: [copy, causal]\nschemes: [rope]\ntask_options: {copy: {max_steps: 5}}\neval_windows: 3\n")
    assert {cell.task.name for cell in study_cells(parse_study([str(path), "--tasks=copy"], ""))} == {"copy"}
    assert study_cells(parse_study([str(path), "--max_steps=9"], ""))
    for flag in ("--max_steps=9", "--eval_windows=4"):
        with pytest.raises(SettingsError, match=f"{flag[:-2]} is given, but no task of this study .copy. uses it"):
            study_cells(parse_study([str(path), "--tasks=copy", flag], ""))
    path.write_text("schemes: [rope, t5]\nscheme_options: {t6: {}}\n")
    with pytest.raises(SettingsError, match="names 't6'"):
        parse_study([str(path), "--schemes=rope"], "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheme: [none]", "Unknown setting 'scheme'.*Did you mean 'schemes'"),
        ("max_steps: many", "--max_steps is 'many'; expected a valid integer"),
        ("learning_rate: high", "valid number"),
        ("3: 4", "Keys should be strings"),
    ],
)
def test_a_study_that_cannot_be_read_says_why(tmp_path, text, message):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        parse_study([str(path)], "")


def test_identity_holds_what_changes_a_result_and_nothing_else():
    def identity(**options):
        return study_cells(StudySettings(schemes="none", tasks="masked", **options))[0].identity({"corpus": "d"})

    assert identity(workers=7, output_dir="x", checkpoint_every=3, name="y") == identity()
    for change in ({"learning_rate": 1.0}, {"train_length": 16}, {"mlm_probability": 0.3}, {"tokenizer_name": "t"}):
        assert identity(**change) != identity()


def test_every_seed_is_asked_other_questions_and_every_scheme_the_same(monkeypatch):
    asked = []
    monkeypatch.setattr(
        algorithms, "compare_generalization", lambda *_, seed, **__: asked.append(seed) or mock.MagicMock()
    )
    for cell in study_cells(settings(tasks="copy", schemes="rope,alibi", seeds="0,1")):
        cell.task.read(cell, None, mock.MagicMock())
    # 0 is the seed of the validation examples, which the learning rate is chosen by.
    assert asked == [1, 1, 2, 2]


def test_one_worker_for_each_gpu():
    assert StudySettings().worker_count(jobs=12, accelerators=2) == 2
    assert StudySettings(workers=5).worker_count(jobs=3, accelerators=0) == 3


def test_a_scheme_can_be_trained_on_other_lengths_of_a_synthetic_task():
    study = StudySettings(
        schemes="none,longer", tasks="repeated_copy", max_steps=4, batch_size=8,
        scheme_options={"longer": {"scheme": "none", "training": {"train_lengths": "7"}}},
    )  # fmt: skip
    plain, longer = study_cells(study)
    assert (plain.train_lengths, longer.train_lengths) == (list(range(1, 11)), [7])
    tokenizer = study_tokenizer(study)
    data, other = (cell.task.data(cell, tokenizer) for cell in (longer, plain))
    assert len({len(data.train[index]["input_ids"]) for index in range(8)}) == 1
    targets = {int((data.train[index]["labels"] != IGNORED).sum()) for index in range(len(data.train))}
    assert len(targets) == 1
    assert len({int((other.train[index]["labels"] != IGNORED).sum()) for index in range(len(other.train))}) > 1
    assert torch.equal(data.validation.datasets["input_ids"], other.validation.datasets["input_ids"])
