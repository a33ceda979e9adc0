"""A patched model that is saved with `save_pretrained`: equal in a process with the package, refused in any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.checkpoint.adapter_config import SENTENCE
from hf_posenc.entry import INSTALL
from hf_posenc.patching.place.config_entry import WEIGHTS_SENTENCE
from tests.checkpoint.checkpoint_cases import CASES, Case

#: Ways to load a checkpoint, which must give the saved outputs bit for bit.
LOADED = {"auto", "concrete", "sharded", "subfolder", "device_map_auto", "bfloat16", "by_hand"}
#: Routes past the auto classes, which find no file of weights and quote a sentence in its place.
CONCRETE = {"concrete", "config class", "concrete_sharded", "concrete_low_memory", "base"}
CONCRETE |= {"config by hand", "concrete, config by hand", "config of a class"}
EVERYWHERE = {"AutoConfig", "concrete", "config class"}
REFUSED = {*EVERYWHERE, *CONCRETE, "AutoModel", "AutoModelForX", "pipeline", "pipeline without a task"}
REFUSED -= {"config of a class"}
#: What needs no positions.
READ = {"AutoTokenizer", "AutoProcessor"}
#: Routes that see no config, and quote the name of a weight.
WEIGHT = {"load_state_dict", "safetensors"}
ADAPTER = {"PeftConfig", "PeftModel", "AutoPeftModel", "adapter, AutoModel", "adapter, class", "adapter, load_adapter"}
TOOLS = {*WEIGHT, *READ, *ADAPTER, "config of a class", "transformers serve", "SentenceTransformer", "CrossEncoder"}
SUBJECT = "checkpoint you are trying to load"
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def reloaded(checkpoints: Path, fresh: Callable[[str, Path], Any]) -> dict[str, Any]:
    return fresh("with", checkpoints)


@pytest.fixture(scope="module")
def refusals(checkpoints: Path, fresh: Callable[[str, Path], Any]) -> dict[str, Any]:
    pytest.importorskip("peft")
    pytest.importorskip("sentence_transformers")
    return fresh("without", checkpoints)


@by_case
def test_a_fresh_process_gives_bit_equal_outputs_and_the_lengths(reloaded: dict[str, Any], case: Case) -> None:
    """In bfloat16 those of the model after it was converted."""
    found = reloaded[case.name]
    lengths = found.pop("lengths")
    assert case.lengths is None or lengths == case.lengths
    assert set(found) == (LOADED if case.every_route else {"auto", "bfloat16"})
    for route, result in found.items():
        assert result["difference"] == 0.0, route
        assert result["is_stock_class"], (route, result["class"])
        assert result["dtypes"] == [f"torch.{route if route == 'bfloat16' else 'float32'}"], route
        assert not result["training"], route


@by_case
def test_a_process_without_the_package_is_refused_with_its_name(refusals: dict[str, Any], case: Case) -> None:
    messages = refusals[case.name]
    expected = REFUSED if case.every_route else EVERYWHERE
    assert set(messages) == (expected | TOOLS if case.name == "llama-t5" else expected)
    for route, message in messages.items():
        if route in ADAPTER:
            assert SENTENCE in message, route
        elif route in WEIGHT:
            assert "position_encoding" in message, (route, message)
        elif route in CONCRETE:
            assert WEIGHTS_SENTENCE in message, (route, message)
        elif route in READ:
            assert message == "LOADED", (route, message)
        else:
            # The type of the model, before any advice to update transformers.
            assert message.startswith(f"ValueError: The {SUBJECT} has model type `hf_posenc ({INSTALL}, "), message
            assert "import hf_posenc before loading" in message
            assert message.index("updating Transformers does not help") < message.index("pip install --upgrade")


def test_weights_are_safetensors_and_converters_find_no_class_that_they_know(checkpoints: Path) -> None:
    """Converters that cannot load the config read the file, and choose by `architectures` (llama.cpp, vLLM, others)."""
    folders = [checkpoints / case.name for case in CASES]
    suffixes = {path.suffix for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".md", ".jinja", ""}
    assert len(list((checkpoints / "llama-t5" / "sharded").glob("*.safetensors"))) > 1
    config = json.loads((checkpoints / "llama-t5" / "config.json").read_text())
    assert config["model_type"].startswith(f"hf_posenc ({INSTALL}")
    assert config["architectures"] == ["hf_posenc.LlamaForCausalLM"]
