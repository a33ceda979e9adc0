"""The JSON of the explorer is what the library says now, and small."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_posenc.schemes import get_scheme
from tests.explorer.library import DATA, data

REMEDY = "run: python docs/explorer/make_data.py"


@pytest.fixture(scope="module")
def make_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", DATA.parent / "make_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_options_are_those_of_the_configs(make_data: ModuleType) -> None:
    assert (DATA / "options.json").read_text(encoding="utf-8") == make_data.encoded(make_data.options_data()), REMEDY


@pytest.mark.assets
def test_tables_are_those_of_the_library_and_of_minilm(make_data: ModuleType) -> None:
    try:
        fresh = make_data.tables_data()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    committed = data("tables")
    assert _shape(committed) == _shape(json.loads(json.dumps(fresh))), REMEDY
    for one, other in zip(_numbers(committed), _numbers(fresh), strict=True):
        # Rounded to at least two digits; another build of torch may round the last one otherwise.
        assert one == pytest.approx(other, rel=2e-2, abs=1e-6), REMEDY


@pytest.mark.assets
def test_the_dogs_of_minilm_are_what_the_library_measures(make_data: ModuleType) -> None:
    try:
        fresh = make_data.dog_minilm_data()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    committed = data("dog_minilm")
    assert _shape(committed) == _shape(fresh), REMEDY
    for name, distances in committed["distances"].items():
        # Float32 in six layers; values at rounding level are stored as 0.
        assert distances == pytest.approx(fresh["distances"][name], rel=1e-2, abs=1e-6), REMEDY


def test_trained_weights_fit_the_schemes_and_were_trained(make_data: ModuleType) -> None:
    trained = data("trained")
    assert set(trained["schemes"]) == set(make_data.TRAINED)
    assert "compare" in trained["command"]
    for name, by_task in trained["schemes"].items():
        assert set(by_task) == set(make_data.TASKS)
        for task, weights in by_task.items():
            context = make_data.place(causal=task == "causal")
            options = {"num_positions": make_data.TABLE_ROWS} if name == "learned" else {}
            parts = get_scheme(name)(**options).build(context)
            for part in parts:
                for key, parameter in part.named_parameters():
                    found = torch.tensor(weights[key])
                    heads_cut = [4 if size == make_data.MOST_HEADS else size for size in parameter.shape]
                    assert list(found.shape) == heads_cut, (name, key)
    t5 = torch.tensor(trained["schemes"]["t5"]["causal"]["weight"])
    # New entries have a standard deviation of 0.05 in the study's models.
    assert float(t5.abs().max()) > 0.3


def test_the_front_matter_makes_a_static_space() -> None:
    yaml = pytest.importorskip("yaml")
    _, front, text = (DATA.parent / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    settings = yaml.safe_load(front)
    assert settings["sdk"] == "static"
    assert (DATA.parent / settings["app_file"]).is_file()
    # The hub refuses longer descriptions.
    assert len(settings["short_description"]) <= 60
    assert text.strip().startswith("# ")


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 300_000


def test_the_page_names_no_other_server() -> None:
    for path in DATA.parent.rglob("*"):
        if path.suffix in (".html", ".js", ".css"):
            text = (
                path.read_text(encoding="utf-8")
                .replace("http://www.w3.org/2000/svg", "")
                .replace("http://localhost", "")
            )
            assert "http://" not in text.replace("xmlns='http:", "").replace("'http://www.w3.org", ""), path
            # Papers are linked, not loaded.
            assert "https://" not in text.replace("https://arxiv.org/abs/", ""), path


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [len(value), *([_shape(value[0])] if value and isinstance(value[0], list) else [])]
    return value if isinstance(value, str) else None


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for one in value.values() for number in _numbers(one)]
    if isinstance(value, list):
        return [number for one in value for number in _numbers(one)]
    return [] if isinstance(value, str) else [float(value)]
