"""Managers of continuous batching that were made, kept or started before the scheme of their model was exchanged."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.recipes import swap_scheme
from tests.matrix.running import patched
from tests.matrix.test_behaviour import SCHEMES
from tests.patching.test_continuous_batching import PAGED, SETTINGS, alone, prompts, quiet  # noqa: F401

#: After which a manager that does not answer is a failure.
SECONDS = 600


def manager_of(model: Any) -> Any:
    return model.init_continuous_batching(
        generation_config=GenerationConfig(**SETTINGS, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**PAGED),
    )


@contextlib.contextmanager
def started(manager: Any, **kept: Any) -> Iterator[Any]:
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, timeout=SECONDS, **kept)


def results(manager: Any, given: list[list[int]]) -> list[Any]:
    """The finished results of a running manager, in the order of the prompts."""
    names, found = manager.add_requests(given), {}
    while len(found) < len(given):
        result = manager.get_result(timeout=SECONDS)
        assert result is not None
        if result.is_finished():
            found[result.request_id] = result
    return [found[name] for name in names]


def exchange(model: Any, scheme: str | None) -> None:
    if scheme is None:
        unpatch_model(model)
    else:
        patch_model(model, SCHEMES[scheme])


def assert_serves(manager: Any, model: Any, given: list[list[int]], **kept: Any) -> None:
    with started(manager, **kept):
        found = results(manager, given)
    assert [result.error for result in found] == [None] * len(given)
    assert [result.generated_tokens for result in found] == [alone(model, prompt)[0] for prompt in given]


@pytest.mark.parametrize(
    ("before", "after", "backend"),
    [
        (None, "rope", "sdpa"),
        (None, "alibi", "sdpa"),
        (None, "t5", "eager"),
        # Pages that are wider than the keys are filled up.
        ("forget_gate", "rope", "sdpa"),
        ("pope", "forget_gate", "eager"),
        ("forget_gate", None, "sdpa"),
    ],
)
def test_a_manager_that_was_made_before_the_scheme_serves_it(
    before: str | None, after: str | None, backend: str
) -> None:
    model = patched("llama_gqa", before and SCHEMES[before])
    model.set_attn_implementation(backend)
    manager = manager_of(model)
    exchange(model, after)
    assert_serves(manager, model, prompts()[1:3])


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        *(
            (before, after, "the keys of this scheme have width .*, but its pages have width")
            for before, after in ((None, "forget_gate"), (None, "pope"), ("alibi", "pope"), ("forget_gate", "pope"))
        ),
        (None, "normalized_integer", "it depends on the length of the sequence"),
    ],
)
def test_or_says_in_every_result_why_it_cannot(before: str | None, after: str, reason: str) -> None:
    model = patched("llama_gqa", before and SCHEMES[before])
    manager = manager_of(model)
    exchange(model, after)
    with started(manager):
        for result in results(manager, prompts()[:2]):
            assert result.generated_tokens == []
            assert f"Continuous batching cannot run the scheme {model.position_encoding.config.name!r}" in result.error
            assert re.search(reason, result.error)
    if after != "normalized_integer":
        assert "Create a new one with model.init_continuous_batching()." in result.error
        assert_serves(manager_of(model), model, prompts()[:2])


EXCHANGES: list[Callable[[Any], Any]] = [
    lambda model: patch_model(model, "t5"),
    lambda model: patch_model(model, "alibi", layers=[0]),
    lambda model: patch_model(model.base_model, "t5"),
    unpatch_model,
    lambda model: swap_scheme(model, "t5", initialization="default"),
    lambda model: Transaction(model).suspended().__enter__(),
    native_scheme,
]


@pytest.mark.parametrize("scheme", ["alibi", None])
def test_no_scheme_is_exchanged_while_a_manager_runs(scheme: str | None) -> None:
    model, other = patched("llama_gqa", scheme), patched("llama_gqa", scheme)
    with started(manager_of(model)) as manager:
        encoding, expected = getattr(model, "position_encoding", None), [alone(other, prompts()[3])[0]]
        for call in EXCHANGES[: None if scheme else 3]:
            with pytest.raises(UnsupportedError, match=r"Continuous batching is running .*manager\.stop"):
                call(model)
            assert getattr(model, "position_encoding", None) is encoding
        # Another model is not affected.
        patch_model(other, "t5")
        assert [result.generated_tokens for result in results(manager, prompts()[3:])] == expected
    patch_model(model, "t5")
    assert_serves(manager_of(model), model, prompts()[3:])


@pytest.mark.parametrize(("before", "after"), [(None, "alibi"), ("alibi", None), ("alibi", "sinusoidal")])
def test_a_manager_that_is_started_again_shares_no_page_of_another_scheme(
    before: str | None, after: str | None
) -> None:
    model, given = patched("llama_gqa", before and SCHEMES[before]), prompts()[3:]
    model.set_attn_implementation("sdpa")
    manager = manager_of(model)
    if model.config._attn_implementation != "sdpa":
        pytest.skip(f"transformers {transformers.__version__} leaves paged attention when a manager stops, for good")
    assert_serves(manager, model, given, keep_for_next_session=True)
    exchange(model, after)
    assert_serves(manager, model, given)


def test_a_cuda_graph_of_a_manager_made_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a GPU: what the check asks is answered as a stream that is being captured would."""
    model = patch_model(patched("llama_gqa", None), "alibi")
    check = next(iter(model.position_encoding.stacks.values())).runtime.pages
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with pytest.raises(UnsupportedError, match=r"a graph cannot read them.*model\.init_continuous_batching"):
        check.check(torch.nn.Module())
