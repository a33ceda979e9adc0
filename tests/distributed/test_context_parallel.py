"""Two processes that share the tokens of a sequence: equal to one process, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import UnsupportedError
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.split_sequence import SplitSequence
from tests.distributed.context_worker import MAPS, QUICK, REFUSED, SLOW
from tests.distributed.processes import run_two
from tests.versions import torch_since

Found = list[dict[str, Any]]

#: Sums in another order.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both processes found."""
    torch_since("2.13", "context_parallel leaves its handlers of attention in place when it ends")
    return run_two("context_worker", tmp_path_factory.mktemp("context"))


def check(found: Found, way: str, schemes: tuple[str, ...]) -> None:
    for rank in found:
        steps = {scheme: rank["trained"][f"{way} {scheme}"] for scheme in schemes}
        assert all(max(step.values()) <= CLOSE for step in steps.values()), steps


@pytest.mark.long
@pytest.mark.parametrize("way", QUICK)
def test_losses_and_gradients_of_a_bias_are_those_of_one_process(found: Found, way: str) -> None:
    """Gradients are summed over both processes, of the parameters of the bias too."""
    check(found, way, QUICK[way])


@pytest.mark.slow
def test_losses_and_gradients_of_every_bias_are_those_of_one_process(tmp_path: Path) -> None:
    torch_since("2.13", "context_parallel leaves its handlers of attention in place when it ends")
    both = run_two("context_worker", tmp_path, everything=True)
    for way, schemes in SLOW.items():
        check(both, way, schemes)


@pytest.mark.parametrize("scheme", MAPS)
def test_tokens_with_given_positions_may_be_dealt_out(found: Found, scheme: str) -> None:
    """Queries and keys are those of one process; the exchange of keys itself is torch's, on accelerators only."""
    for rank in found:
        assert rank["mapped"][scheme] <= CLOSE


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_by_parts_is_refused(found: Found, case: str) -> None:
    for rank in found:
        assert REFUSED[case] in rank["refused"][case]


def test_a_layer_with_tokens_of_its_own_is_refused() -> None:
    """As with CPM-Ant's prompt: it is not known where they are among the tokens of all processes."""
    state = ForwardState(4, sequence=SplitSequence(None, torch.arange(8), (), is_plain=True))
    with pytest.raises(UnsupportedError, match="a layer has other tokens than the model"):
        state.by_slots(6)
