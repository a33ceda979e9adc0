"""Every cell of docs/reference/tools.md is what happens: equal numbers, or a refusal with its reason."""

from __future__ import annotations

import json

import pytest
import torch

from docs.generate import tools
from tests.integrations.adapting import METHODS, PROMPTS, WITHOUT_ROW
from tests.integrations.table import SLOW, TOOLS
from tests.integrations.tool import EQUAL, SCHEMES, Tool, outcome
from tests.versions import INSTALLED, TESTED

RECORD = json.loads(tools.DATA.read_text())


def _cases() -> list:
    return [
        pytest.param(tool, name, id=f"{tool.name}-{name}", marks=_marks(row, tool, name))
        for row, tool in enumerate(TOOLS)
        for name in SCHEMES
    ]


def _marks(row: int, tool: Tool, name: str) -> list:
    """The default run takes every refusal, and of the equal cells of each row two that go round from row to row.

    The next rows are mostly other uses of the same tool, so each tool still meets every scheme. Of a training, which
    takes two seconds, it takes one; that of preferences, without LoRA, has T5's bias, whose parameters are copied.
    """
    turn = (list(SCHEMES).index(name) + row + 7) % len(SCHEMES)
    turns = (0,) if tool.group == "Training" else (0, 4)
    chosen = turn in turns or RECORD["cells"][f"{tool.group} / {tool.name}"][name] != EQUAL
    return [] if chosen and tool.name not in SLOW else [pytest.mark.slow]


@pytest.mark.parametrize(("tool", "name"), _cases())
def test_a_cell_says_what_happens(tool: Tool, name: str) -> None:
    missing = tool.missing()
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install '.[tools]'")
    torch.set_num_threads(1)
    recorded = RECORD["cells"][f"{tool.group} / {tool.name}"][name]
    found = outcome(tool, SCHEMES[name])
    if INSTALLED < TESTED and found not in (recorded, EQUAL):
        pytest.skip(f"recorded with transformers {TESTED}; with {INSTALLED} this is refused: {found}")
    assert found == recorded or (INSTALLED < TESTED and found == EQUAL)


def test_the_page_is_made_of_the_record() -> None:
    assert tools.PAGE.read_text() == tools.page(RECORD)


def test_the_record_has_a_cell_for_every_tool_and_scheme() -> None:
    expected = {f"{tool.group} / {tool.name}" for tool in TOOLS}
    assert set(RECORD["cells"]) == expected
    assert all(set(cells) == set(SCHEMES) for cells in RECORD["cells"].values())


def test_every_method_of_peft_has_a_row_or_a_reason() -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[tools]'")
    known = {name.split(" ")[0] for name in (*METHODS, *PROMPTS)} | set(WITHOUT_ROW)
    assert {kind.value for kind in peft.PeftType} - known == set()


def test_a_wrong_number_is_no_refusal() -> None:
    def differs(scheme: object) -> None:
        raise AssertionError("the outputs differ by 1")

    with pytest.raises(AssertionError, match="differ by 1"):
        outcome(Tool("group", "name", differs, "oracle"), "none")


def test_native_is_equal_wherever_a_decoder_runs() -> None:
    native = {name: cells["native"] for name, cells in RECORD["cells"].items() if cells["native"] != EQUAL}
    # Where PEFT does not notice the cache, stock models generate wrong tokens.
    refused = {name for name, cell in native.items() if "This PEFT does not notice the cache" not in str(cell)}
    assert refused <= {"PEFT / SHADOW"}
