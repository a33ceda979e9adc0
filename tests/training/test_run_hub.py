"""Models pushed to a hub, which a server on this machine stands in for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from tests.training.hub_server import Hub, serving
from tests.training.run_cases import results, run, start, words, write_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


def push(hub: Hub, arguments: list[str]) -> tuple[int, str]:
    """A run in a process whose hub is that server. Returns its status and what it said."""
    process = start(arguments, more={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_nothing"})
    _, said = process.communicate(timeout=120)
    return process.returncode, said.decode()


def test_a_model_is_pushed_with_its_card(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "alibi"
    with serving(Hub()) as hub:
        status, said = push(hub, words(texts, output, scheme="alibi", push_to_hub="true", save_steps=5))
    assert status == 0, said
    assert hub.repositories == ["someone/alibi"]
    messages = [message for message, _ in hub.commits]
    assert messages[-1] == "End of training"
    assert "Training in progress, step 5" in messages
    assert not any("Model save" in message for message in messages)
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    for name, content in hub.files.items():
        (pulled / name).parent.mkdir(exist_ok=True)
        (pulled / name).write_bytes(content)
    assert AutoModelForCausalLM.from_pretrained(pulled).position_encoding.config.name == "alibi"
    card = ModelCard.load(pulled / "README.md")
    assert "alibi" in card.data.tags
    assert "import hf_posenc  # before from_pretrained" in card.text
    assert 'from_pretrained("someone/alibi")' in card.text
    assert f"{results(output)['eval_loss']:.4f}" in card.text
    assert str(tmp_path) not in card.content


def test_a_merged_model_is_pushed_without_its_adapter_in_the_way(texts: Path, tmp_path: Path, capsys: Any) -> None:
    base, output = tmp_path / "base", tmp_path / "tuned"
    assert run(words(texts, base, max_steps=1)) == 0
    options: dict[str, Any] = {
        "model_type": None, "config_overrides": None, "model_name_or_path": base, "scheme": "kerple", "lora": "true",
        "push_to_hub": "true", "max_steps": 2, "save_steps": 1,
    }  # fmt: skip
    assert run(words(texts, output, **options)) == 2
    assert "With --lora give --hub_strategy end" in capsys.readouterr().err
    assert not output.exists()
    with serving(Hub()) as hub:
        status, said = push(hub, words(texts, output, **options, hub_strategy="end"))
    assert status == 0, said
    assert len(hub.commits) == 1
    assert "model.safetensors" in hub.files
    assert "adapter/adapter_config.json" in hub.files
    assert "adapter_config.json" not in hub.files
    assert "kerple" in hub.files["README.md"].decode()
    assert AutoModelForCausalLM.from_pretrained(output).position_encoding.config.name == "kerple"


def test_a_hub_that_refuses_leaves_the_model(texts: Path, tmp_path: Path) -> None:
    """The model is a stock one, whose card is that of Trainer."""
    output = tmp_path / "out"
    arguments = words(texts, output, push_to_hub="true", max_steps=2, hub_strategy="end", save_steps=1)
    with serving(Hub(refuse=("/commit/",))) as hub:
        status, said = push(hub, arguments)
    assert status == 1
    assert "Traceback" not in said
    assert f"The model is complete in {output}, but could not be pushed to the hub: " in said
    assert results(output)["eval_loss"] > 0
    weights = (output / "model.safetensors").read_bytes()
    with serving(Hub()) as hub:
        status, said = push(hub, arguments)
    assert status == 0, said
    assert hub.files["model.safetensors"] == weights
    assert "generated_from_trainer" in hub.files["README.md"].decode()


def test_a_hub_that_is_not_there_is_found_out_before_training(texts: Path, tmp_path: Path) -> None:
    hub = Hub()
    hub.url = "http://127.0.0.1:9"  # the port that discards; nothing listens there
    status, said = push(hub, words(texts, tmp_path / "out", push_to_hub="true"))
    assert status == 2
    assert "Traceback" not in said
    assert "--push_to_hub" in said
    assert not (tmp_path / "out/run_settings.json").exists()
