"""Two processes that share the heads of each layer: equal to one process, or refused on both."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hf_posenc import UnsupportedError
from tests.distributed.processes import run_two
from tests.distributed.tensor_parallel_worker import (
    ARCHITECTURES,
    COMPILED,
    CUT,
    GENERATED,
    PLANS,
    QUICK_SCHEME,
    QUICK_WAYS,
    SAVED,
    SHARES_EXPERTS,
    WAYS,
)
from tests.matrix.running import patched, tokens
from tests.schemes.table import TABLE

pytestmark = pytest.mark.long

#: Sums in another order: 1e-6, beside differences of 1 between schemes.
CLOSE = 1e-5
#: The same for gradients, as a share of each. A process that kept its own heads' would be off by half.
CLOSE_GRADIENTS = 1e-3


class Run(NamedTuple):
    """What both processes found, in a part or in all of the variants and ways."""

    ranks: list[dict[str, Any]]
    everything: bool


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["part", "everything"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    return Run(run_two("tensor_parallel_worker", folder, everything=request.param), request.param)


@pytest.mark.parametrize("heads", ["grouped", "single"])
def test_two_processes_give_the_outputs_and_gradients_of_one(run: Run, heads: str) -> None:
    """With a key head each, and with a single head each."""
    cases = [f"{heads} {name}-0" for name in CUT if name in TABLE]
    for rank in run.ranks:
        assert rank["placed"].keys() >= set(cases)
        for case in [case for case in rank["placed"] if case.startswith(heads)]:
            found = rank["placed"][case]
            if case.startswith("single rope_pp"):
                assert "of LlamaAttention together, but each of 2 processes has 1 head." in found["refused"]
                continue
            assert found["same"], (case, "parameters are those of the first process")
            assert found["forward"] <= CLOSE, (case, found)
            assert found.get("decoded", 0) <= CLOSE, (case, found)
            assert found["gradients"] <= CLOSE_GRADIENTS, (case, found)
    trained = [found.get("trained", 0) for case, found in run.ranks[0]["placed"].items() if case.startswith(heads)]
    assert sum(count > 0 for count in trained) >= 5


def test_two_processes_save_the_file_of_one(run: Run) -> None:
    for rank in run.ranks:
        assert rank["saved"].keys() == set(CUT if run.everything else SAVED)
        for name, found in rank["saved"].items():
            assert found["files"] == 0, name
            assert max(found["forward"], found["again"]) <= CLOSE, (name, found)


def test_architectures_with_other_plans_and_experts_are_equal(run: Run) -> None:
    for rank in run.ranks:
        assert rank["architectures"].keys() == ARCHITECTURES.keys()
        for name, by_scheme in rank["architectures"].items():
            for scheme, difference in by_scheme.items():
                if name == "experts" and scheme in ("forget_gate", "pope"):
                    assert "Call patch_model before the model is sharded" in difference, scheme
                    continue
                assert isinstance(difference, float), (name, scheme, difference)
                assert difference <= CLOSE, (name, scheme, difference)
        if SHARES_EXPERTS:
            assert rank["experts"].keys() == {"forget_gate", "pope"}
            assert max(rank["experts"].values()) <= CLOSE


def test_two_processes_generate_the_tokens_of_one(run: Run) -> None:
    schemes, ways = (GENERATED, WAYS) if run.everything else ((QUICK_SCHEME,), QUICK_WAYS)
    for rank in run.ranks:
        assert rank["generated"] == {scheme: dict.fromkeys(ways, True) for scheme in schemes}


def test_compiled_processes_give_outputs_and_gradients_of_one_process(run: Run) -> None:
    for rank in run.ranks:
        assert rank["compiled"].keys() == (set(COMPILED) if run.everything else set())
        for scheme, found in rank["compiled"].items():
            assert found["forward"] <= CLOSE, (scheme, found)
            assert found["gradients"] <= CLOSE_GRADIENTS, (scheme, found)


REFUSED = {
    "one head for two": "LlamaAttention has 1 query head, which 2 processes cannot share evenly",
    "one key head for two": "LlamaAttention has 1 key head, which 2 processes cannot share evenly",
    "two key heads in both": "keeps all 2 key heads in each of them",
    "sequences": "splits sequences between processes ('model.layers.*.input_layernorm': 'sequence_parallel')",
}


def test_plans_are_followed_or_refused_on_both_processes(run: Run) -> None:
    for rank in run.ranks:
        for name in PLANS:
            for scheme, found in rank["plans"][name].items():
                if name not in REFUSED:
                    assert found <= CLOSE, (name, scheme, found)
                elif scheme != "None":
                    assert REFUSED[name] in found, (name, scheme)


def test_a_scheme_is_fitted_in_one_process_only(run: Run) -> None:
    for rank in run.ranks:
        assert "so that none of them has the logits of all heads" in rank["swapped"]


@pytest.mark.parametrize("scheme", ["alibi", "ssmax", "learned_rope"])
def test_heads_that_somebody_else_has_split_are_noticed(scheme: str) -> None:
    """Half of the projections, as a hand-written plan leaves them."""
    model = patched("llama_gqa", scheme)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(layer.self_attn, name)
            projection.weight = torch.nn.Parameter(projection.weight[: len(projection.weight) // 2])
    with pytest.raises(UnsupportedError, match="for each of 4 heads, but this layer computes 2 heads"):
        model(tokens())
