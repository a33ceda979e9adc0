"""Two processes that share the heads of each layer: equal to one process, or refused on both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
from tests.schemes.table import TABLE, VARIANTS

#: Sums in another order: 1e-6, beside differences of 1 between schemes.
CLOSE = 1e-5
#: The same for gradients, as a share of each. A process that kept its own heads' would be off by half.
CLOSE_GRADIENTS = 1e-3

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both processes found."""
    return run_two("tensor_parallel_worker", tmp_path_factory.mktemp("tensor_parallel"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The same, with all variants and ways."""
    return run_two("tensor_parallel_worker", tmp_path_factory.mktemp("everything"), everything=True)


def check_placed(ranks: Found, cases: list[str]) -> None:
    for rank in ranks:
        for case in cases:
            one = rank["placed"][case]
            assert one["same"], (case, "parameters are those of the first process")
            assert one["forward"] <= CLOSE, (case, one)
            assert one.get("decoded", 0) <= CLOSE, (case, one)
            assert one["gradients"] <= CLOSE_GRADIENTS, (case, one)


@pytest.mark.parametrize("heads", ["grouped", "single"])
def test_two_processes_give_the_outputs_and_gradients_of_one(found: Found, heads: str) -> None:
    """With a key head each, and with a single head each."""
    check_placed(found, [f"{heads} {name}-0" for name in CUT if name in TABLE])
    trained = [one["trained"] for case, one in found[0]["placed"].items() if case.startswith(heads)]
    assert sum(count > 0 for count in trained) >= 5


@pytest.mark.slow
def test_every_variant_of_every_scheme_does(everything: Found) -> None:
    check_placed(everything, [f"{heads} {case}" for heads in ("grouped", "single") for _, _, case in VARIANTS])


def check_saved(ranks: Found, names: Iterable[str]) -> None:
    for rank in ranks:
        assert rank["saved"].keys() == set(names)
        for name, one in rank["saved"].items():
            assert one["files"] == 0, name
            assert max(one["forward"], one["again"]) <= CLOSE, (name, one)


def test_two_processes_save_the_file_of_one(found: Found) -> None:
    check_saved(found, SAVED)


@pytest.mark.slow
def test_two_processes_save_the_file_of_one_for_every_way_to_cut_heads(everything: Found) -> None:
    check_saved(everything, CUT)


def check_architectures(ranks: Found) -> None:
    for rank in ranks:
        assert rank["architectures"].keys() == ARCHITECTURES.keys()
        for name, by_scheme in rank["architectures"].items():
            for scheme, difference in by_scheme.items():
                if name == "experts" and scheme in ("forget_gate", "pope"):
                    assert "Call patch_model before fully_shard" in difference, scheme
                    continue
                assert isinstance(difference, float), (name, scheme, difference)
                assert difference <= CLOSE, (name, scheme, difference)
        if SHARES_EXPERTS:
            assert rank["experts"].keys() == {"forget_gate", "pope"}
            assert max(rank["experts"].values()) <= CLOSE


def test_architectures_with_other_plans_and_experts_are_equal(found: Found) -> None:
    check_architectures(found)


@pytest.mark.slow
def test_stock_models_and_other_schemes_are_equal_in_architectures_too(everything: Found) -> None:
    check_architectures(everything)


def test_two_processes_generate_the_tokens_of_one(found: Found) -> None:
    for rank in found:
        assert rank["generated"] == {QUICK_SCHEME: dict.fromkeys(QUICK_WAYS, True)}


@pytest.mark.slow
def test_two_processes_generate_the_tokens_of_one_in_every_way(everything: Found) -> None:
    for rank in everything:
        assert rank["generated"] == {scheme: dict.fromkeys(WAYS, True) for scheme in GENERATED}


@pytest.mark.slow
def test_compiled_processes_give_outputs_and_gradients_of_one_process(everything: Found) -> None:
    for rank in everything:
        assert rank["compiled"].keys() == set(COMPILED)
        for scheme, one in rank["compiled"].items():
            assert one["forward"] <= CLOSE, (scheme, one)
            assert one["gradients"] <= CLOSE_GRADIENTS, (scheme, one)


REFUSED = {
    "one head for two": "LlamaAttention has 1 query head, which 2 processes cannot share evenly",
    "one key head for two": "LlamaAttention has 1 key head, which 2 processes cannot share evenly",
    "two key heads in both": "keeps all 2 key heads in each of them",
    "sequences": "splits sequences between processes ('model.layers.*.input_layernorm': 'sequence_parallel')",
}


def check_plans(ranks: Found) -> None:
    for rank in ranks:
        for name in PLANS:
            for scheme, words in rank["plans"][name].items():
                if name not in REFUSED:
                    assert words <= CLOSE, (name, scheme, words)
                elif scheme != "None":
                    assert REFUSED[name] in words, (name, scheme)


def test_plans_are_followed_or_refused_on_both_processes(found: Found) -> None:
    check_plans(found)


@pytest.mark.slow
def test_plans_are_for_every_kind_of_scheme(everything: Found) -> None:
    check_plans(everything)


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
