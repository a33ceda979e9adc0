"""A patched model saved with `save_pretrained` and loaded by transformers' own functions in another process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.checkpoint_cases import CASES, Case

#: Ways to load a checkpoint, which must give the saved outputs bit for bit.
LOADED = {"auto", "concrete", "sharded", "subfolder", "device_map_cpu", "device_map_auto", "low_memory", "float32"}
LOADED |= {"state_dict", "bfloat16"}
#: Routes past the auto classes, and all that are refused.
CONCRETE = {"concrete", "concrete_sharded", "concrete_low_memory", "base"}
REFUSED = CONCRETE | {"AutoConfig", "AutoModel", "AutoModelForX", "pipeline"}
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="session")
def reloaded(checkpoints: Path, fresh: Callable[[str, Path], Any]) -> dict[str, Any]:
    return fresh("with", checkpoints)


@pytest.fixture(scope="session")
def refused(checkpoints: Path, fresh: Callable[[str, Path], Any]) -> dict[str, Any]:
    return fresh("without", checkpoints)


@by_case
def test_a_fresh_process_gives_bit_equal_outputs(reloaded: dict[str, Any], case: Case) -> None:
    """In bfloat16 those of the model after it was converted."""
    found = reloaded[case.name]
    assert set(found) == (LOADED if case.every_route else {"auto", "bfloat16"})
    for route, result in found.items():
        assert result["difference"] == 0.0, route
        assert result["is_stock_class"], (route, result["class"])
        assert result["dtypes"] == [f"torch.{route if route == 'bfloat16' else 'float32'}"], route
        assert not result["training"], route


@by_case
def test_a_process_without_the_package_is_refused_with_its_name(refused: dict[str, Any], case: Case) -> None:
    messages = refused[case.name]
    assert set(messages) == (REFUSED if case.every_route else {"AutoConfig", "concrete"})
    for route, message in messages.items():
        # Auto classes quote the type of the model, and others a sentence.
        words = ("pip install .", "import hf_posenc") if route in CONCRETE else ("install", "import")
        assert all(word in message for word in words), (route, message)


def test_weights_are_safetensors_only(checkpoints: Path) -> None:
    suffixes = {path.suffix for path in checkpoints.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ""}
    assert len(list((checkpoints / "llama-t5" / "sharded").glob("*.safetensors"))) > 1
