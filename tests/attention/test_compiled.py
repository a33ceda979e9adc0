"""Compiled models with a bias: one graph, and no more of them than stock has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

from tests.matrix.running import patched, tokens
from tests.thinning import mostly_slow

#: The second one compiles for any length, and the third one shows it.
LENGTHS = (32, 48, 64)
#: One for each form of a bias.
SCHEMES = ["alibi", "t5", "forget_gate", "shaw"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(scheme: str | None, train: bool) -> int:
    """How many graphs a model compiles to at several lengths, in one piece each."""
    model = patched("llama_gqa", scheme, attn_implementation="sdpa", max_position_embeddings=128, num_hidden_layers=1)
    counter = CompileCounterWithBackend("aot_eager" if train else "eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in LENGTHS:
        input_ids = tokens(length=length)
        if train:
            compiled(input_ids, labels=input_ids, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                found = compiled(input_ids, use_cache=False).logits
                wanted = model(input_ids, use_cache=False).logits
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    return counter.frame_count


#: One for the first length, and one for all others.
STOCK_GRAPHS = 2


def test_what_stock_needs() -> None:
    assert graphs(None, False) == STOCK_GRAPHS


@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, lambda scheme: scheme == "t5"))
def test_no_more_graphs_than_stock(scheme: str) -> None:
    assert graphs(scheme, False) <= STOCK_GRAPHS


@pytest.mark.parametrize("scheme", mostly_slow(["t5", "forget_gate"], lambda scheme: scheme == "t5"))
def test_training_steps_too(scheme: str) -> None:
    assert graphs(scheme, True) <= STOCK_GRAPHS


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_static_cache_is_decoded_in_one_graph(scheme: str) -> None:
    model = patched("llama_gqa", scheme, attn_implementation="sdpa", num_hidden_layers=1)
    input_ids = tokens(batch=1, length=12)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        wanted = model(input_ids).logits[:, 8:]
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(input_ids[:, :8], past_key_values=cache)
        found = [compiled(input_ids[:, slot : slot + 1], past_key_values=cache).logits for slot in range(8, 12)]
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 1
