"""Compiled models: one graph, and no more of them than stock has."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from tests.kits import decoding as kit
from tests.matrix.running import gradients, placed, tokens
from tests.models import tiny
from tests.thinning import mostly_slow
from tests.versions import torch_since

from .block_sizes import set_sizes
from .graphs import DECODED, LENGTHS, SCHEMES, decoded, model_of, trained

#: One for each form of a bias, and for each other place of a scheme.
FORMS = ["alibi", "t5", "forget_gate", "shaw", "disentangled", "none", "rope", "sinusoidal", "learned"]
#: One for the first length, and one for all others.
STOCK_GRAPHS = 2


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(architecture: str, scheme: str | None) -> int:
    """How many graphs a fresh model compiles to at several lengths, in one piece each."""
    model = model_of(architecture, scheme)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    arguments = {} if architecture == "bert" else {"use_cache": False}
    with torch.no_grad():
        # The model itself runs last, because it could prepare something that the graphs need.
        found = [compiled(tokens(length=length), **arguments).logits for length in LENGTHS]
        wanted = [model(tokens(length=length), **arguments).logits for length in LENGTHS]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    return counter.frame_count


@pytest.mark.parametrize("architecture", mostly_slow(["llama_gqa", "bert"], lambda name: name == "llama_gqa"))
def test_what_stock_needs(architecture: str) -> None:
    assert graphs(architecture, None) == STOCK_GRAPHS


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    mostly_slow(
        [pair for pair in product(["llama_gqa", "bert", "bloom"], FORMS) if pair != ("bert", "forget_gate")],
        {("llama_gqa", "t5"), ("bert", "learned"), ("bloom", "shaw")}.__contains__,
    ),
)
def test_no_more_graphs_than_stock(architecture: str, scheme: str) -> None:
    assert graphs(architecture, scheme) <= STOCK_GRAPHS


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, {"none", "rope", "t5"}.__contains__))
def test_evaluation_between_training_steps_compiles_nothing_again(scheme: str) -> None:
    """Nor does a call that is not compiled."""
    model, ids, counts = model_of("llama_gqa", SCHEMES[scheme]), tokens(length=12), []
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for trains in (False, True, False, True):
        model.train(trains)
        with torch.set_grad_enabled(trains):
            loss = compiled(ids, labels=ids, use_cache=False).loss
        if trains:
            loss.backward()
        counts.append(counter.frame_count)
        model(ids, use_cache=False)
    assert counts == [1, 2, 2, 2]


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, {"alibi", "kerple"}.__contains__))
def test_one_graph_if_no_length_is_fixed(scheme: str) -> None:
    model = model_of("llama_gqa", SCHEMES[scheme], num_hidden_layers=1).train()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in (14, 40):
        ids = tokens(length=length)
        compiled(ids, labels=ids, use_cache=False).loss.backward()
    assert counter.frame_count == 1


@pytest.mark.long
@torch.no_grad()
def test_the_first_call_of_a_table_that_numbers_its_rows_may_be_compiled() -> None:
    model, ids = model_of("opt", "alibi"), tokens(length=12)
    found = torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_long_inputs_add_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones get a matrix, and long ones the kernel for distances."""
    torch_since("2.13", "a graph has no block sparsity")
    set_sizes(monkeypatch, short_pairs=50**2)
    assert graphs("llama_gqa", "alibi") == STOCK_GRAPHS + 1


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, {"t5", "forget_gate", "pope", "string"}.__contains__))
def test_training_steps_too(scheme: str) -> None:
    steps = trained(SCHEMES[scheme])
    for found, wanted in zip(steps.found, steps.wanted, strict=True):
        assert found.keys() == wanted.keys()
        for name, one in wanted.items():
            torch.testing.assert_close(found[name], one, atol=2e-6, rtol=1e-4)
    assert steps.graphs <= STOCK_GRAPHS
    assert not steps.again, "the second call of a shape is compiled again"
    assert not steps.spoilers


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, {"alibi", "rope"}.__contains__))
@torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
@pytest.mark.parametrize("architecture", ["llama_gqa", "bloom"])
def test_gradient_checkpointing_breaks_no_graph_where_side_effects_are_allowed(architecture: str, scheme: str) -> None:
    torch_since("2.13", "a graph has other gradients in rows of padding")
    model, ids = model_of(architecture, SCHEMES[scheme], num_hidden_layers=2).train(), tokens(length=12)
    mask, found = kit.left_padding(12, 3), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if checkpointing else model
        torch.manual_seed(0)
        found.append(gradients(model, call(ids, attention_mask=mask, labels=ids, use_cache=False).loss))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    mostly_slow(
        [
            *product(["llama_gqa"], DECODED),
            # Its attention computes queries and keys in one projection, and its cache is updated in another place.
            *product(["gpt2"], ["rope", "alibi", "sinusoidal", "forget_gate", "pope", "cope"]),
            # It computes its scores itself.
            *product(["bloom"], ["rope", "alibi", "sinusoidal", "forget_gate", "pope", "string", "selective_rope"]),
        ],
        {
            *product(["llama_gqa"], ["forget_gate", "shaw", "rope", "learned"]),
            *product(["bloom"], ["string", "selective_rope"]),
        }.__contains__,
    ),
)
def test_a_static_cache_is_decoded_in_one_graph(architecture: str, scheme: str) -> None:
    steps = decoded(SCHEMES[scheme], architecture)
    torch.testing.assert_close(steps.found, steps.wanted, atol=1e-4, rtol=1e-4)
    # Before torch 2.13, a cache whose update was intercepted in a graph is another one for the next call.
    assert architecture == "gpt2" or steps.graphs <= (1 if torch.__version__ >= "2.13" else 2)
    assert not steps.spoilers
    assert steps.outputs == 1, "something of this call is kept for the next one"


@pytest.mark.parametrize("scheme", mostly_slow(DECODED, {"alibi", "selective_rope"}.__contains__))
def test_a_cache_that_grows_is_decoded_in_as_many_graphs_as_by_stock(scheme: str) -> None:
    model, ids = model_of("llama_gqa", SCHEMES[scheme], num_hidden_layers=2), tokens(batch=1, length=12)
    counter, cache = CompileCounterWithBackend("eager"), DynamicCache(config=model.config)
    wanted = kit.decoded(model, ids, None, [12])[:, 6:]
    kit.decoded(model, ids, cache, [6])
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    found = kit.decoded(compiled, ids, cache, [1] * 6, start=6)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= STOCK_GRAPHS


@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, {"alibi", "fire", "string"}.__contains__))
def test_layers_that_are_compiled_alone_share_their_graphs(scheme: str) -> None:
    model, ids = model_of("llama_gqa", SCHEMES[scheme], num_hidden_layers=5), tokens(length=12)
    counter, found = CompileCounterWithBackend("eager"), []
    for compiled in (True, False):
        for layer in model.model.layers:
            layer._compiled_call_impl = torch.compile(layer._call_impl, backend=counter) if compiled else None
        for mask in (kit.left_padding(12, 3), kit.left_padding(12, 5)):
            torch.manual_seed(0)
            found.append(model(ids, attention_mask=mask, use_cache=False).logits)
    torch.testing.assert_close(found[:2], found[2:], atol=1e-5, rtol=1e-5)
    # The first layer computes what the others share.
    assert counter.frame_count <= 3


def test_a_graph_that_breaks_inside_attention_is_right_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(*args: object, **kwargs: object) -> object:
        torch._dynamo.graph_break()
        return sdpa_attention_forward(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setitem(AttentionInterface._global_mapping, "breaking", breaking)
    model, ids = model_of("llama_gqa", SCHEMES["rope"], num_hidden_layers=3), tokens(batch=1, length=12)
    model.config._attn_implementation = "breaking"
    wanted = model(ids, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(backend="eager")
    torch.testing.assert_close(model(ids, use_cache=False).logits, wanted)


class FunctionInside(LlamaAttention):
    """Its graph breaks."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
        """As in Llama."""

        def heads(values: Tensor) -> Tensor:
            return values.view(*hidden_states.shape[:-1], -1, self.head_dim).transpose(1, 2)

        query, key, value = map(
            heads, (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        torch._dynamo.graph_break()
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.o_proj(output.flatten(2)), weights


@pytest.mark.parametrize("order", [1, -1])
def test_a_function_inside_a_forward_whose_graph_breaks_is_compiled_for_each_model(order: int) -> None:
    """Layers, and the stock model, have the same code object, but not the same globals."""
    models = [model_of("llama_gqa", None, num_hidden_layers=3) for _ in range(2)]
    for layer in (layer for model in models for layer in model.model.layers):
        layer.self_attn.__class__ = FunctionInside
    placed(models[1], SCHEMES["rope"])
    calls = [functools.partial(model, tokens(batch=1, length=12), use_cache=False) for model in models][::order]
    wanted = [call().logits for call in calls]
    for model in models:
        for layer in model.model.layers:
            layer.compile(backend="eager")
    torch.testing.assert_close([call().logits for call in calls], wanted)


@pytest.mark.parametrize("kind", ["FalconForCausalLM", "GPTNeoXJapaneseForCausalLM", "RoFormerForMaskedLM"])
def test_modules_that_rotate_and_compute_their_scores_are_one_graph(kind: str) -> None:
    torch_since("2.13", "a method of a cache cannot leave a graph")
    model = placed(tiny(kind).eval(), SCHEMES["rope"])
    wanted = model(tokens()).logits
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(tokens()).logits, wanted)


def test_a_model_that_copies_its_config_in_its_forward_is_one_graph() -> None:
    """For a decoder's cache. The config has the entry of the scheme, and the name of a loaded model."""
    torch_since("2.13", "the copy of an object cannot be in a graph")
    model = tiny("BartForConditionalGeneration").eval()
    model.config._name_or_path = model.name_or_path = "some/model"
    placed(model, SCHEMES["alibi"])
    wanted = model(tokens()).logits
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(tokens()).logits, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_inductor_computes_the_same(scheme: str) -> None:
    model, ids = model_of("llama_gqa", SCHEMES[scheme]), tokens(batch=1, length=12)
    compiled = torch.compile(model, fullgraph=True)
    results: list[list[torch.Tensor]] = []
    for call in (compiled, model):
        torch.manual_seed(0)
        output = call(ids, labels=ids, use_cache=False)
        results.append([output.logits, *gradients(model, output.loss).values()])
    if scheme in DECODED:
        for number, call in enumerate((compiled, model)):
            cache = StaticCache(config=model.config, max_cache_len=16)
            kit.decoded(model, ids, cache, [8])
            results[number].append(kit.decoded(call, ids, cache, [1] * 4, start=8))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
