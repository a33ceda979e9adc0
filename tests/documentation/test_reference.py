"""Every public name, option and setting is in the reference."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sphinx.util.inventory import InventoryFile

import hf_posenc
from docs.generate import limits
from hf_posenc import metrics, plots, recipes, report
from hf_posenc.cli.parser import _parser
from hf_posenc.evaluations import EVALUATIONS
from hf_posenc.schemes import SubConfig, registered_configs
from tests.documentation.built import page
from tests.documentation.conftest import ROOT, site_extension
from training.study.settings import StudySettings, SwapArguments, TaskOptions

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (hf_posenc, metrics, recipes, plots, report)
    for name in module.__all__
    if name != "__version__" and not inspect.ismodule(getattr(module, name))
}
SCALINGS = [one for one in SubConfig._types.values() if one.__module__.startswith("hf_posenc.")]
CONFIGS = [one for one in registered_configs() if one.__module__.startswith("hf_posenc.")]
WITH_FIELDS = {
    *(one for one in PUBLIC.values() if inspect.isclass(one) and dataclasses.is_dataclass(one)), *SCALINGS, *CONFIGS
}  # fmt: skip


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    return site_extension("docstrings")


@pytest.fixture(scope="module")
def documented(site: Path) -> dict[str, str]:
    """The page of every Python name, by the name."""
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {name: item.uri.partition("#")[0] for kind, items in inventory.data.items() if kind.startswith("py:")
            for name, item in items.items()}  # fmt: skip


def test_every_public_name_is_documented(documented: dict[str, str]) -> None:
    homes = {
        name: f"{one.__module__}.{one.__qualname__}" for name, one in PUBLIC.items() if hasattr(one, "__qualname__")
    }
    assert {name for name in PUBLIC if name not in documented and homes.get(name) not in documented} == set()
    assert {one.__name__ for one in CONFIGS if f"hf_posenc.{one.__name__}" not in documented} == set()


def test_the_table_of_errors_has_every_class_with_its_bases_and_its_meaning() -> None:
    table = (ROOT / "docs" / "reference" / "api" / "errors.md").read_text(encoding="utf-8")
    stated = re.compile(r'^class ([A-Z]\w+Error)\((.+)\):\n    """(.+?)(?:"""|\n)', re.MULTILINE)
    for file in Path(hf_posenc.__file__).parent.rglob("*.py"):
        for name, bases, meaning in stated.findall(file.read_text(encoding="utf-8")):
            shown = [f"`{base}`" for base in bases.split(", ") if base not in ("Exception", "PositionEncodingError")]
            if name != "DoesNotApplyError":  # It is caught where it is raised.
                assert f"| `{name}` | {', '.join(shown) or '-'} | {meaning} | " in table


@pytest.mark.parametrize("cls", sorted(WITH_FIELDS, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_every_field_has_a_meaning(cls: type, docstrings: ModuleType) -> None:
    meanings = docstrings.meanings(cls)
    assert {one.name for one in dataclasses.fields(cls) if one.init and len(meanings.get(one.name, "")) < 4} == set()


@pytest.mark.parametrize("cls", [*SCALINGS, hf_posenc.RopeConfig, hf_posenc.AlibiConfig], ids=lambda one: one.__name__)
def test_a_page_shows_every_field_with_its_type_and_default(
    cls: type, documented: dict[str, str], site: Path, docstrings: ModuleType
) -> None:
    text = " ".join(page(site / documented[f"hf_posenc.{cls.__name__}"]).text.split())
    for field in dataclasses.fields(cls):
        default = docstrings.default(field)
        state = f"default {default}" if default else "required"
        assert f"{field.name} ({field.type}, {state}) – " in text


def test_a_field_without_a_meaning_is_found(docstrings: ModuleType) -> None:
    @dataclasses.dataclass(frozen=True)
    class Described:
        """Described.

        Args:
            beta_fast: turns.
        """

        beta_fast: float = 32.0

    @dataclasses.dataclass(frozen=True)
    class Half(Described):
        """Half described.

        Args:
            one: a number.
        """

        one: int = 1
        two: int = 2

    meanings = docstrings.meanings(Half)
    assert meanings["one"] == "a number."
    assert meanings["beta_fast"]
    assert "two" not in meanings


def options_of(parser: Any) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_the_page_of_the_command_line_has_every_subcommand_and_option(site: Path) -> None:
    text = page(site / "reference" / "command_line.html").text
    (verbs,) = [action for action in _parser(chosen=None)._actions if hasattr(action, "choices") and action.choices]
    for name, parser in verbs.choices.items():
        assert f"hf-posenc {name}" in text
        assert {option for option in options_of(parser) if option not in text} == set()
    assert {name for name in EVALUATIONS if f"hf-posenc eval {name}" not in text} == set()
    assert "--sliding-window" in text


def test_the_page_of_studies_has_every_setting_with_its_meaning(site: Path) -> None:
    text = page(site / "reference" / "study_settings.html").text
    fields = {**StudySettings.model_fields, **TaskOptions.model_fields}
    assert {name for name, field in fields.items() if name not in text or not field.description} == set()
    swap = {one.name: one.metadata.get("help") for one in dataclasses.fields(SwapArguments)}
    assert {name for name, meaning in swap.items() if name not in text or not meaning} == set()


def test_the_table_of_environments_is_that_of_the_library() -> None:
    text = (ROOT / "docs" / "reference" / "limits.md").read_text()
    assert limits.page(text) == text, "run docs/generate/limits.py"


def test_the_tests_that_the_page_of_tools_names_exist() -> None:
    text = (ROOT / "docs" / "reference" / "tools.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert len(named) >= 5
    assert {name for name in named if not (ROOT / name).is_file()} == set()
