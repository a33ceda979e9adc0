"""The JSON of the explorer agrees with the library, and is small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from docs.explorer import make_data
from docs.explorer.recorded import packed, unpacked
from hf_posenc import list_schemes
from hf_posenc.schemes import get_scheme, registered_configs
from tests.explorer.library import DATA, data
from tests.thinning import mostly_slow

RECORDED = list(data("recorded")["schemes"])
REMEDY = "run: python docs/explorer/make_data.py"


def test_options_are_those_of_the_configs() -> None:
    assert (DATA / "options.json").read_text(encoding="utf-8") == make_data.encoded(make_data.options_data()), REMEDY


def test_every_scheme_of_the_library_is_in_the_explorer() -> None:
    entries, examples = data("options")["schemes"], data("recorded")["schemes"]
    assert set(list_schemes()) <= set(entries), REMEDY
    # Those with a page in the reference, which links to the explorer: all that are not only about places of a model.
    assert set(entries) == {one.name for one in registered_configs()} - {"native", "parts", "cross_attention"}, REMEDY
    assert set(entries) == set(make_data.FORMULAS) | set(examples), REMEDY
    assert not set(make_data.FORMULAS) & set(examples)
    assert all(examples.values())


@pytest.mark.parametrize("name", mostly_slow(RECORDED, lambda name: name in RECORDED[::4]))
def test_what_was_recorded_is_what_the_library_computes(name: str) -> None:
    fresh = json.loads(json.dumps(make_data.recorded_examples(name)))
    committed = data("recorded")["schemes"][name]
    computed = {"cells", "largest", "distance"}
    first, second = ({at: one for at, one in _leaves(value) if not computed & {*at}} for value in (committed, fresh))
    assert first == second, REMEDY
    for example in committed:
        for mode in {"both", "causal"} & set(committed[example]):
            expected = pytest.approx(fresh[example][mode]["distance"], rel=1e-2, abs=1e-5)
            assert committed[example][mode]["distance"] == expected, REMEDY
    for one, other in zip(_packed(committed), _packed(fresh), strict=True):
        # One step of the rounding, and what another build of torch may round otherwise.
        step = other["largest"] * (2e-2 if other["bits"] == 8 else 2e-3) + 1e-6
        assert float((unpacked(one) - unpacked(other)).abs().max()) <= step, REMEDY


def test_packed_numbers_are_unpacked() -> None:
    values = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).double()
    for bits, share in ((8, 5e-3), (16, 1e-3)):
        torch.testing.assert_close(
            unpacked(packed(values, bits)), values, rtol=0, atol=share * float(values.abs().max())
        )


@pytest.mark.assets
@pytest.mark.parametrize(
    ("name", "close"),
    [
        # Rounded to at least two digits; another build of torch may round the last one otherwise.
        ("tables", 2e-2),
        # Float32 in six layers; values at rounding level are stored as 0.
        ("dog_minilm", 1e-2),
    ],
)
def test_numbers_of_minilm_are_what_the_library_computes(name: str, close: float) -> None:
    try:
        fresh = json.loads(json.dumps(getattr(make_data, f"{name}_data")()))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for kinds in (str, int | float):
        first, second = (
            {at: one for at, one in _leaves(value) if isinstance(one, kinds)} for value in (data(name), fresh)
        )
        assert first == (second if kinds is str else pytest.approx(second, rel=close, abs=1e-6)), REMEDY


def test_trained_weights_fit_the_schemes_and_were_trained() -> None:
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
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 600_000


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


def _leaves(value: Any, *path: object) -> Iterator[tuple[tuple[object, ...], Any]]:
    """All texts and numbers of a JSON value, with their places."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(one, *path, key)
    else:
        yield path, value


def _packed(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict) and "cells" in value:
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for one in inside for found in _packed(one)]
