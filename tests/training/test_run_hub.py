"""Models pushed to a hub, which a server on this machine stands in for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM

from tests.hub import Hub, Place, serving
from tests.hub_clients import Clients
from tests.training.run_cases import refused, results, run, words

Push = Callable[[Hub, list[str]], tuple[int, str]]
PROGRAM = """
import contextlib, io, json, sys
from training import run_clm
said = io.StringIO()
with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
    status = run_clm.main(sys.argv[1:])
print(json.dumps([status, said.getvalue()]))
"""


@pytest.fixture(scope="module")
def push(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Push]:
    """A run in another process while a hub is there. Returns its status and what it said."""
    with serving(Place(Hub())) as place, Clients(place.url, tmp_path_factory.mktemp("home")) as clients:

        def pushed(hub: Hub, arguments: list[str]) -> tuple[int, str]:
            place.hub = hub
            status, said = clients(PROGRAM, *arguments)
            return status, said

        yield pushed


@pytest.mark.long
def test_a_model_is_pushed_with_its_card(push: Push, texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "alibi"
    hub = Hub()
    status, said = push(hub, words(texts, output, scheme="alibi", push_to_hub="true", save_steps=5))
    assert status == 0, said
    assert list(hub.repositories) == ["someone/alibi"]
    messages = [commit.message for commit in hub.commits]
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


def test_a_merged_model_is_pushed_without_its_adapter_in_the_way(
    push: Push, texts: Path, tmp_path: Path, capsys: Any
) -> None:
    base, output = tmp_path / "base", tmp_path / "tuned"
    assert run(words(texts, base, max_steps=1)) == 0
    options: dict[str, Any] = {
        "model_type": None, "config_overrides": None, "model_name_or_path": base, "scheme": "kerple", "lora": "true",
        "push_to_hub": "true", "max_steps": 2, "save_steps": 1,
    }  # fmt: skip
    assert "With --lora use --hub_strategy end" in refused(capsys, run, words(texts, output, **options))
    assert not output.exists()
    hub = Hub()
    status, said = push(hub, words(texts, output, **options, hub_strategy="end"))
    assert status == 0, said
    assert len(hub.commits) == 1
    assert "model.safetensors" in hub.files
    assert "adapter/adapter_config.json" in hub.files
    assert "adapter_config.json" not in hub.files
    assert "kerple" in hub.files["README.md"].decode()
    assert AutoModelForCausalLM.from_pretrained(output).position_encoding.config.name == "kerple"


def test_a_hub_that_refuses_leaves_the_model(push: Push, texts: Path, tmp_path: Path) -> None:
    """The model is a stock one, whose card is that of Trainer."""
    output = tmp_path / "out"
    arguments = words(texts, output, push_to_hub="true", max_steps=2, hub_strategy="end", save_steps=1)
    status, said = push(Hub(refuse=("/commit/",)), arguments)
    assert status == 1
    assert "Traceback" not in said
    assert f"The model is complete in {output}, but could not be pushed to the hub: " in said
    assert results(output)["eval_loss"] > 0
    weights = (output / "model.safetensors").read_bytes()
    hub = Hub()
    status, said = push(hub, arguments)
    assert status == 0, said
    assert hub.files["model.safetensors"] == weights
    assert "generated_from_trainer" in hub.files["README.md"].decode()


@pytest.mark.long
def test_a_hub_that_is_not_there_is_found_out_before_training(
    texts: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise HfHubHTTPError.__bases__[0]("[Errno 111] Connection refused")  # what its HTTP client raises

    monkeypatch.setattr("transformers.Trainer.init_hf_repo", unreachable)
    assert run(words(texts, tmp_path / "out", push_to_hub="true")) == 2
    assert "--push_to_hub: [Errno 111] Connection refused" in capsys.readouterr().err
    assert not (tmp_path / "out/run_settings.json").exists()
