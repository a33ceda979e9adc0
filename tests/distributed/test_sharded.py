"""Two processes that share a batch or the weights: equal to one process, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_two
from tests.distributed.sharded_worker import FEWER, QUICK, SCHEMES, WAYS

Found = list[dict[str, Any]]

#: Sums in another order, and a mean of two means.
CLOSE = 1e-5
#: bfloat16 has 8 bits: gradients of half a batch are rounded before their mean is taken. Parameters stay float32 in
#: two processes only, so those of one are no measure.
ROUNDED = 1e-2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both processes found."""
    return run_two("sharded_worker", tmp_path_factory.mktemp("sharded"))


def check_steps(found: Found, steps: Mapping[str, Iterable[str]]) -> None:
    for rank in found:
        for way, schemes in steps.items():
            close = ROUNDED if "bfloat16" in way else CLOSE
            for scheme in schemes:
                step = rank["trained"][f"{way} {scheme}"]
                assert max(step["loss"], step["gradients"]) <= close, (way, scheme, step)
                assert close == ROUNDED or step["parameters"] <= CLOSE, (way, scheme, step)


@pytest.mark.long
def test_a_training_step_of_two_processes_is_that_of_one(found: Found) -> None:
    check_steps(found, QUICK)


@pytest.mark.slow
def test_a_training_step_of_every_scheme_is_that_of_one(tmp_path: Path) -> None:
    steps = {way: FEWER.get(way, SCHEMES) for way in WAYS}
    check_steps(run_two("sharded_worker", tmp_path, everything=True), steps)


def test_transformers_shards_a_patched_folder_and_writes_the_same_file(found: Found) -> None:
    for rank in found:
        assert max(rank["transformers"]["forward"], rank["transformers"]["again"]) <= CLOSE
        assert rank["transformers"]["files"] == 0


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("fsdp1", "Call patch_model before the model is sharded"),
        ("fsdp2", "Call patch_model before the model is sharded"),
        ("ddp", "Call patch_model before the model is wrapped"),
    ],
)
def test_a_model_that_is_shared_takes_no_new_parameters(found: Found, way: str, words: str) -> None:
    for rank in found:
        assert rank["late"][f"{way} alibi"] <= CLOSE
        for scheme in ("t5", "pope"):
            message = rank["late"][f"{way} {scheme}"]
            assert words in message, message


def test_sharded_weights_name_their_scheme_and_are_not_read_into_another(found: Found) -> None:
    for rank in found:
        assert rank["checkpoints"]["marks"] == 1
        assert rank["checkpoints"]["t5"] <= CLOSE
        message = rank["checkpoints"]["alibi"]
        assert message.startswith("The weights in this checkpoint do not belong to this state dict")
        assert "trained with the position encoding t5, but this model has the position encoding alibi" in message
    assert found[0]["checkpoints"]["gathered"] <= CLOSE
