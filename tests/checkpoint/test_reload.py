"""A patched model saved with `save_pretrained` and loaded by transformers' own functions in another process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.checkpoint_cases import CASES, Case

#: Routes that must give the saved outputs bit for bit.
EXACT = [
    "auto",
    "concrete",
    "sharded",
    "subfolder",
    "device_map_cpu",
    "device_map_auto",
    "low_memory",
    "float32",
    "state_dict",
]
REFUSED = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForX",
    "concrete",
    "concrete_sharded",
    "concrete_low_memory",
    "base",
    "pipeline",
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="session")
def reloaded(checkpoints: Path, fresh: Callable[[str, Path], Any]) -> dict[str, Any]:
    return fresh("with", checkpoints)


@pytest.fixture(scope="session")
def refused(checkpoints: Path, fresh: Callable[[str, Path], Any]) -> dict[str, Any]:
    return fresh("without", checkpoints)


@by_case
@pytest.mark.parametrize("route", EXACT)
def test_fresh_process_gives_bit_equal_outputs(reloaded: dict[str, Any], case: Case, route: str) -> None:
    result = reloaded[case.name][route]
    assert result["difference"] == 0.0
    assert result["is_stock_class"], result["class"]
    assert result["dtypes"] == ["torch.float32"]
    assert not result["training"]


@by_case
def test_loading_in_bfloat16_equals_converting_to_bfloat16(reloaded: dict[str, Any], case: Case) -> None:
    result = reloaded[case.name]["bfloat16"]
    assert result["dtypes"] == ["torch.bfloat16"]
    assert result["difference"] == 0.0


@by_case
@pytest.mark.parametrize("route", REFUSED)
def test_process_without_hf_posenc_is_refused_by_name(refused: dict[str, Any], case: Case, route: str) -> None:
    message = refused[case.name][route]
    assert message != "LOADED"
    assert "hf_posenc" in message or "hf-posenc" in message


@by_case
@pytest.mark.parametrize("route", [route for route in REFUSED if route.startswith(("concrete", "base"))])
def test_concrete_classes_say_what_to_install(refused: dict[str, Any], case: Case, route: str) -> None:
    assert "pip install hf-posenc" in refused[case.name][route]
    assert "import hf_posenc" in refused[case.name][route]


def test_weights_are_safetensors_only(checkpoints: Path) -> None:
    suffixes = {path.suffix for path in checkpoints.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ""}
    assert len(list((checkpoints / "llama-t5" / "sharded").glob("*.safetensors"))) > 1
