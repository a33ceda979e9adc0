"""Patched models in ExecuTorch: the same numbers at every length, or a refusal.

These tests need `executorch`, which is not among the packages of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import UnsupportedError
from hf_posenc.errors import UsageError
from hf_posenc.export.carriers import Form
from hf_posenc.export.comparison import excess
from hf_posenc.export.export_model import export_model
from hf_posenc.export.layers import ModelParts
from hf_posenc.export.records import Check

from .models import visible

pytest.importorskip("executorch", reason="executorch is not installed: pip install executorch==1.5.1")

from hf_posenc.export.executorch import ExecutorchExport

#: Two layers differ less than the check allows.
CLOSE = 1e-5
LLAMA, BERT = "LlamaForCausalLM", "BertModel"


@torch.no_grad()
def checks(model: Any, folder: Path, max_length: int) -> list[Check]:
    export = ExecutorchExport(max_length).of(ModelParts(model), folder, None)
    return list(export.checks(Form(carrier="")))


@pytest.fixture(scope="module")
def alibi(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A BERT with ALiBi, its program beyond the native 64 tokens, and the report."""
    model, folder = visible(BERT, "alibi"), tmp_path_factory.mktemp("executorch") / "alibi"
    return model, folder, export_model(model, folder, to="executorch", max_length=80)


def test_a_program_gives_the_same_numbers_past_the_native_length(alibi: Any) -> None:
    from executorch.runtime import Runtime

    model, folder, report = alibi
    assert [check.quantity for check in report.checks] == ["last hidden state", "pooler output"]
    assert all(check.difference <= CLOSE for check in report.checks)
    ids = torch.randint(3, 40, (1, 75), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 60:] = 0
    program = Runtime.get().load_program(folder / "model.pte")
    found = program.load_method("forward").execute([ids, mask, torch.zeros_like(ids)])[0]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[:, :60], expected[:, :60], atol=1e-5, rtol=1e-5)


def test_the_model_is_unchanged_and_the_card_says_what_is_left_out(alibi: Any) -> None:
    model, folder, report = alibi
    fresh = visible(BERT, "alibi")
    for weight, before in zip(model.parameters(), fresh.parameters(), strict=True):
        assert weight.requires_grad == before.requires_grad
        assert torch.equal(weight, before)
    assert set(report.files) == {"model.pte", "config.json", "README.md", "export.json"}
    assert "position_encoding" not in json.loads((folder / "config.json").read_text())
    card = (folder / "README.md").read_text()
    assert "up to 80 tokens" in card
    assert "There is no cache" in card
    assert b"XnnpackBackend" in (folder / "model.pte").read_bytes()


def test_the_check_finds_a_lost_bias(alibi: Any) -> None:
    _, folder, _ = alibi
    for other in ("none", "kerple"):
        assert "The last hidden state" in excess("", checks(visible(BERT, other), folder, 80))


def test_the_check_finds_a_shorter_length(alibi: Any) -> None:
    model, folder, _ = alibi
    with pytest.raises(UnsupportedError, match="cannot run the program on 96 tokens"):
        checks(model, folder, 96)


#: A program takes several seconds to compile, so the default run makes one of each kind.
SLOW = [(BERT, "t5"), (BERT, "rope"), (BERT, None), (LLAMA, None)]


@pytest.mark.parametrize(
    ("name", "scheme"), [(LLAMA, "alibi"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_schemes_give_equal_numbers(name: str, scheme: str | None, tmp_path: Path) -> None:
    report = export_model(visible(name, scheme), tmp_path / "out", to="executorch", max_length=32)
    assert report.checks[0].quantity == ("logits" if name == LLAMA else "last hidden state")
    assert all(check.difference <= CLOSE for check in report.checks)


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        (BERT, 65, "cannot run 65 tokens"),
        ("T5ForConditionalGeneration", None, "an encoder and a decoder"),
        *((BERT, wrong, "max_length") for wrong in (1, 2.5, "many")),
    ],
)
def test_what_cannot_be_exported_is_refused(name: str, length: Any, message: str, tmp_path: Path) -> None:
    options = {} if length is None else {"max_length": length}
    with pytest.raises((UnsupportedError, UsageError), match=message):
        export_model(visible(name), tmp_path / "out", to="executorch", **options)
