"""Two processes among which DeepSpeed partitions weights (ZeRO-3): equal to one process, or refused.

DeepSpeed changes what other packages import, so it is not in the environment of the other tests:

    pip install --no-deps --target outputs/deepspeed -r tests/deepspeed.txt
    PYTHONPATH=$PWD/outputs/deepspeed python -m pytest --long tests/distributed/test_deepspeed.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_two

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
Found = list[dict[str, Any]]
#: Sums in another order, and a mean of two means.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both processes found."""
    return run_two("deepspeed_worker", tmp_path_factory.mktemp("deepspeed"))


def check_steps(found: Found) -> None:
    for rank in found:
        for case, step in rank["trained"].items():
            assert step["empty"], case
            assert step["native"], case
            assert max(step["patched"], step["loaded"]) <= CLOSE, (case, step)


def test_a_training_step_of_two_processes_is_that_of_one(found: Found) -> None:
    check_steps(found)


@pytest.mark.slow
def test_a_training_step_of_every_scheme_is_that_of_one(tmp_path: Path) -> None:
    check_steps(run_two("deepspeed_worker", tmp_path, everything=True))


def test_files_of_two_models_are_refused(found: Found) -> None:
    for rank in found:
        assert "were trained with a position encoding of hf_posenc" in rank["refused"]["stock"]
        assert "trained with the position encoding t5" in rank["refused"]["other"]


def test_a_scheme_is_undone_and_a_model_is_built_from_a_config(found: Found) -> None:
    for rank in found:
        assert rank["refused"]["undone"]
        assert 0 < rank["refused"]["built"] < 1


def test_an_engine_takes_no_new_parameters(found: Found) -> None:
    for rank in found:
        assert "before the model is sharded (by FSDP, by an engine of DeepSpeed)" in rank["refused"]["late"]
