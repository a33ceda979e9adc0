"""Compiled models: one graph, and no more of them than stock has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

from tests.matrix.running import patched, tokens
from tests.matrix.test_behaviour import SCHEMES as ALL_SCHEMES
from tests.thinning import mostly_slow

#: The second one compiles for any length, and the third one shows it.
LENGTHS = (32, 48, 64)
#: One for each form of a bias, and for each other place of a scheme.
SCHEMES = ["alibi", "t5", "forget_gate", "shaw", "disentangled", "none", "rope", "sinusoidal", "learned"]
#: All that serve a cache.
DECODED = [name for name in ALL_SCHEMES if name != "normalized_integer"]
#: Operators that read the device on the host, or copy numbers of the host: CUDA graphs cannot hold them.
SPOILERS = ("_local_scalar_dense", "lift_fresh", "nonzero", "unique", "masked_select")
#: One for the first length, and one for all others.
STOCK_GRAPHS = 2


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(architecture: str, scheme: str | None) -> Any:
    """A graph grows with the layers, so there is one."""
    overrides = {"max_position_embeddings": 128, "num_hidden_layers": 1}
    return patched(architecture, scheme, attn_implementation="sdpa", **overrides)


def graphs(architecture: str, scheme: str | None) -> int:
    """How many graphs a fresh model compiles to at several lengths, in one piece each."""
    model = model_of(architecture, scheme)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    arguments = {"use_cache": False} if architecture == "llama_gqa" else {}
    with torch.no_grad():
        # The model itself runs last: it would prepare something that the graphs may be in want of.
        found = [compiled(tokens(length=length), **arguments).logits for length in LENGTHS]
        wanted = [model(tokens(length=length), **arguments).logits for length in LENGTHS]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    return counter.frame_count


@pytest.mark.parametrize("architecture", mostly_slow(["llama_gqa", "bert"], lambda name: name == "llama_gqa"))
def test_what_stock_needs(architecture: str) -> None:
    assert graphs(architecture, None) == STOCK_GRAPHS


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    mostly_slow(
        [pair for pair in product(["llama_gqa", "bert"], SCHEMES) if pair != ("bert", "forget_gate")],
        {("llama_gqa", "t5"), ("bert", "learned")}.__contains__,
    ),
)
def test_no_more_graphs_than_stock(architecture: str, scheme: str) -> None:
    assert graphs(architecture, scheme) <= STOCK_GRAPHS


@pytest.mark.parametrize("scheme", mostly_slow(ALL_SCHEMES, {"t5", "forget_gate", "pope", "string"}.__contains__))
def test_training_steps_too(scheme: str) -> None:
    model, operators = model_of("llama_gqa", ALL_SCHEMES[scheme]), set()

    def read(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.update(str(node.target) for node in graph.graph.nodes)
        assert not list(graph.buffers()), "a constant of the host"
        return make_boxed_func(graph.forward)

    counter = CompileCounterWithBackend(aot_autograd(fw_compiler=read))
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    def gradients(call: Any, length: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        call(tokens(length=length), labels=tokens(length=length), use_cache=False).loss.backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    gradients(compiled, LENGTHS[0])
    for length in LENGTHS:
        found, wanted = gradients(compiled, length), gradients(model, length)
        assert length > LENGTHS[0] or counter.frame_count == 1, "the second call of a shape is compiled again"
        assert found.keys() == wanted.keys()
        for name, one in wanted.items():
            torch.testing.assert_close(found[name], one, atol=2e-6, rtol=1e-4)
    assert counter.frame_count <= STOCK_GRAPHS
    assert operators
    assert not [one for one in operators if any(word in one for word in SPOILERS)]


@pytest.mark.parametrize("scheme", mostly_slow(DECODED, {"forget_gate", "shaw", "rope", "learned"}.__contains__))
@torch.no_grad()
def test_a_static_cache_is_decoded_in_one_graph(scheme: str) -> None:
    model = model_of("llama_gqa", ALL_SCHEMES[scheme])
    input_ids = tokens(batch=1, length=12)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    wanted = model(input_ids).logits[:, 8:]
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(input_ids[:, :8], past_key_values=cache)
    found = [compiled(input_ids[:, slot : slot + 1], past_key_values=cache).logits for slot in range(8, 12)]
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=1e-4, rtol=1e-4)
    # Before torch 2.13, a cache whose update was intercepted in a graph is another one for the next call.
    assert counter.frame_count <= (1 if torch.__version__ >= "2.13" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_inductor_computes_the_same(scheme: str) -> None:
    model, ids = model_of("llama_gqa", ALL_SCHEMES[scheme]), tokens(batch=1, length=12)
    compiled = torch.compile(model, fullgraph=True)
    results: list[list[torch.Tensor]] = []
    for call in (compiled, model):
        model.zero_grad()
        torch.manual_seed(0)
        output = call(ids, labels=ids, use_cache=False)
        output.loss.backward()
        results.append([output.logits, *(one.grad for one in model.parameters() if one.grad is not None)])
    if scheme in DECODED:
        for number, call in enumerate((compiled, model)):
            cache = StaticCache(config=model.config, max_cache_len=16)
            with torch.no_grad():
                model(ids[:, :8], past_key_values=cache)
                steps = [call(ids[:, slot : slot + 1], past_key_values=cache).logits for slot in range(8, 12)]
            results[number].append(torch.cat(steps, dim=1))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
