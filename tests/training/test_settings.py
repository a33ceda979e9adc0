from __future__ import annotations

import pytest

from hf_posenc import UnknownNameError
from training import compare
from training.settings import CompareSettings, SettingsError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "causal,maskd"}, "Unknown task 'maskd'"),
        ({"schemes": ","}, "--schemes names nothing"),
        ({"schemes": "none,none"}, "more than once"),
        ({"scheme_options": "{rope}"}, "not JSON"),
        ({"scheme_options": "[1]"}, "must map scheme names"),
        ({"schemes": "none", "scheme_options": '{"rope": {}}'}, "which --schemes does not name"),
        ({"max_steps": 0}, "--max_steps is 0"),
        ({"train_length": 1}, "--train_length is 1"),
        ({"length_factor": 3}, "power of two"),
        ({"hidden_size": 20, "num_heads": 4}, "heads of 5 dimensions"),
        ({"mlm_probability": 1.0}, "between 0 and 1"),
        ({"validation_fraction": 0.0}, "between 0 and 1"),
        ({"learning_rate": 0.0}, "must be positive"),
        ({"workers": -1}, "cannot be negative"),
    ],
)
def test_a_setting_that_cannot_work_says_why(options, message):
    with pytest.raises(SettingsError, match=message):
        CompareSettings(**options)


def test_unknown_scheme_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'sinusoidal'"):
        CompareSettings(schemes="none,sinusodal").check_scheme_options()


def test_unknown_option_and_value_out_of_range_are_refused_before_training():
    with pytest.raises(UnknownNameError, match="theta"):
        CompareSettings(schemes="rope", scheme_options='{"rope": {"teta": 1.0}}').check_scheme_options()
    with pytest.raises(SettingsError, match="theta"):
        CompareSettings(schemes="rope", scheme_options='{"rope": {"theta": -1.0}}').check_scheme_options()


def test_a_wrong_command_line_leaves_no_output_folder(tmp_path, capsys):
    out = tmp_path / "out"
    assert compare.main(["--schemes=allibi", f"--output_dir={out}"]) == 2
    assert "Did you mean 'alibi'" in capsys.readouterr().err
    assert compare.main(["--schemes=rope", '--scheme_options={"rope": {"theta": -1.0}}', f"--output_dir={out}"]) == 2
    assert "theta" in capsys.readouterr().err
    assert not out.exists()


def test_lengths_double_up_to_the_factor():
    settings = CompareSettings(train_length=24, length_factor=4)
    assert settings.lengths == [24, 48, 96]
    assert settings.max_length == 96


def test_fingerprint_ignores_what_changes_no_result():
    base = CompareSettings().fingerprint()
    assert CompareSettings(workers=7, output_dir="x", schemes="none", checkpoint_every=3).fingerprint() == base
    assert CompareSettings(seed=1).fingerprint() != base


def test_every_option_has_a_help_text(capsys):
    with pytest.raises(SystemExit):
        compare.main(["--help"])
    text = capsys.readouterr().out
    for name in CompareSettings().to_dict():
        assert f"--{name}" in text
    assert "None" not in {field.metadata.get("help") for field in CompareSettings.__dataclass_fields__.values()}


def test_one_worker_where_there_is_an_accelerator():
    assert CompareSettings().worker_count(jobs=12, has_accelerator=True) == 1
    assert CompareSettings(workers=5).worker_count(jobs=3, has_accelerator=False) == 3
