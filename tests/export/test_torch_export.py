"""Programs of torch.export and TorchScript: no operator of this package, no fixed length, equal numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import list_schemes
from tests.fresh import printed, run_fresh
from tests.thinning import mostly_slow

from .models import visible

LLAMA, BERT = "LlamaModel", "BertModel"
CASES = [(LLAMA, scheme, "sdpa") for scheme in list_schemes()]
CASES += [(BERT, scheme, "sdpa") for scheme in ("alibi", "t5", "rope", "shaw")]
CASES += [(BERT, scheme, "eager") for scheme in ("alibi", "t5")]
QUICK = {(LLAMA, scheme, "sdpa") for scheme in ("t5", "forget_gate", "shaw", "rope")}
QUICK |= {(BERT, "alibi", "sdpa"), (BERT, "t5", "eager")}
OPEN = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}


def batch(rows: int, length: int, padded: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 48, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[-1, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def exported(model: Any, **options: Any) -> Any:
    with torch.no_grad():
        return torch.export.export(model, (), batch(2, 12, 3), strict=False, **options)


@torch.no_grad()
def assert_equal(program: Any, model: Any, inputs: dict[str, Tensor]) -> None:
    real = inputs["attention_mask"].bool()
    found, expected = program(**inputs)[0], model(**inputs)[0]
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "scheme", "attention"), mostly_slow(CASES, QUICK.__contains__))
def test_a_program_with_open_lengths(name: str, scheme: str, attention: str) -> None:
    model = visible(name, scheme)
    model.config.use_cache = False
    model.set_attn_implementation(attention)
    program = exported(model, dynamic_shapes={"input_ids": OPEN, "attention_mask": OPEN})
    assert "hf_posenc" not in program.graph_module.code
    for inputs in (batch(2, 12, 3), batch(3, 31, 7), batch(2, 5), batch(1, 23)):
        assert_equal(program.module(), model, inputs)


@pytest.mark.parametrize("scheme", ["alibi", pytest.param("forget_gate", marks=pytest.mark.slow)])
def test_a_saved_program_runs_where_the_package_is_not_installed(scheme: str, tmp_path: Path) -> None:
    model, inputs = visible(LLAMA, scheme), batch(2, 12, 3)
    model.config.use_cache = False
    torch.export.save(exported(model), tmp_path / "program.pt2")
    with torch.no_grad():
        torch.save((inputs, model(**inputs).last_hidden_state), tmp_path / "expected.pt")
    difference = printed(
        run_fresh(
            "import sys, torch, transformers\n"
            "inputs, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
            "found = torch.export.load(sys.argv[1] + '/program.pt2').module()(**inputs)[0]\n"
            "real = inputs['attention_mask'].bool()\n"
            "assert 'hf_posenc' not in sys.modules\n"
            "print(float((found - expected)[real].abs().max()))",
            tmp_path,
        )
    )
    assert float(difference) <= 1e-5


@pytest.mark.parametrize(
    ("scheme", "name"),
    mostly_slow(
        [
            (s, n)
            for s in ("alibi", "t5", "rope", "none", "sinusoidal", "shaw", "forget_gate")
            for n in (BERT, LLAMA)
            if (s, n) != ("forget_gate", BERT)
        ],
        {("alibi", BERT), ("forget_gate", LLAMA)}.__contains__,
    ),
)
def test_a_traced_model_at_other_lengths(scheme: str, name: str) -> None:
    model = visible(name, scheme)
    model.config.use_cache, model.config.return_dict = False, False
    traced = torch.jit.trace(model, tuple(batch(2, 12, 3).values()), check_trace=False)
    assert "hf_posenc::" not in str(traced.inlined_graph)
    for inputs in (batch(2, 12, 3), batch(3, 31, 7), batch(2, 5)):
        assert_equal(lambda **given: traced(*given.values()), model, inputs)
