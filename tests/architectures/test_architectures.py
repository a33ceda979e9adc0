"""The architectures of transformers under every scheme: a cross-section by default, all of them with `-m slow`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .checks import Record, check_pair
from .population import all_pairs

#: One architecture for each way of taking in position, of attending and of laying out tensors. Most of those in
#: `tests/matrix` are not here.
CROSS_SECTION = [
    "causal-llama",
    "causal-mpt",
    "causal-codegen",
    "causal-gemma4_text",
    "causal-deepseek_v2",
    "causal-gpt_oss",
    "causal-phi3",
    "causal-ctrl",
    "causal-beam",
    "causal-nanochat",
    "causal-falcon",
    "masked-bert",
    "masked-roformer",
    "masked-mpnet",
    "masked-deberta",
    "masked-squeezebert",
    "seq2seq-t5",
    "seq2seq-m2m_100",
    "encoder-t5",
]
#: Own mechanisms that no scheme of the library describes: `native_scheme` says so.
WITHOUT_NATIVE = {"causal-xlnet", "masked-deberta[relative]", "masked-deberta-v2[relative]"}
#: CPM-Ant puts 32 prompt tokens in front of left padding, so distances between prompt and text count padding.
KNOWN_FAILURES = {"causal-cpmant": {"left padding"}}
PAIRS = {pair.name: pair for pair in all_pairs()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are ten times slower when threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_holds(record: Record, *, native: bool = True) -> None:
    known = KNOWN_FAILURES.get(record.pair, set())
    schemes = [scheme for scheme in record.findings if native or scheme != "native"]
    failed = {
        f"{scheme}: {name}": (record.findings[scheme][name].value, record.findings[scheme][name].note)
        for scheme in schemes
        for name in record.failed(scheme)
        if name not in known
    }
    assert not failed
    assert schemes


@pytest.mark.parametrize("name", CROSS_SECTION)
def test_every_check_holds(name: str) -> None:
    record = check_pair(PAIRS[name])
    assert not record.refusal
    assert_holds(record)


@pytest.mark.parametrize("name", sorted(WITHOUT_NATIVE))
def test_mechanisms_without_a_name_can_be_replaced(name: str) -> None:
    record = check_pair(PAIRS[name], ("native", "none", "alibi", "t5", "rope"))
    assert_holds(record, native=False)
    assert list(record.failed("native")) == ["patch"]
    assert "UnsupportedError" in record.findings["native"]["patch"].note


@pytest.mark.parametrize(
    "name", ["causal-mamba", "masked-longformer", "masked-funnel", "causal-deepseek_v32", "seq2seq-led"]
)
def test_refusals_name_the_reason_and_leave_no_trace(name: str) -> None:
    record = check_pair(PAIRS[name])
    assert len(record.refusal) > 40
    assert_holds(record)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PAIRS) - set(CROSS_SECTION) - WITHOUT_NATIVE))
def test_sweep(name: str) -> None:
    record = check_pair(PAIRS[name])
    no_name = record.native.startswith("(") and "UnsupportedError" in record.findings["native"]["patch"].note
    assert_holds(record, native=not no_name)
