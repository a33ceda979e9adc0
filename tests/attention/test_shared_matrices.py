"""Matrices of a bias: layers share them, few are kept, and what one layer keeps for its gradients is small."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posenc import ComposedConfig
from hf_posenc.attention import block_attention, blockwise
from hf_posenc.attention.backends import attention_with
from hf_posenc.attention.block_attention import AttentionCall
from hf_posenc.attention.forms import FusedForm, RowsForm
from hf_posenc.patching.call.checked_layer import CheckedLayer
from tests.kits.decoding import left_padding
from tests.matrix.running import gradients, patched, tokens
from tests.thinning import mostly_slow

from .block_sizes import set_sizes
from .fused import attended, masks_of_kernels


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return masks_of_kernels(monkeypatch)


def attend(form: RowsForm, length: int = 6) -> Tensor:
    """A call of one layer."""
    heads = [torch.ones(1, form.heads, length, 4, requires_grad=True) for _ in range(3)]
    return attended(form, *heads, scaling=0.3, is_causal=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cache", [None, StaticCache], ids=["", "static cache"])
@pytest.mark.parametrize("scheme", ["alibi", ComposedConfig(("alibi", "t5"))], ids=["alone", "in a sum"])
def test_layers_share_a_matrix(given: list[Tensor], scheme: Any, dtype: torch.dtype, cache: Any) -> None:
    model = patched("llama_gqa", scheme, attn_implementation="sdpa").to(dtype)
    model(input_ids=tokens(), past_key_values=cache and cache(config=model.config, max_cache_len=64))
    assert len(given) > 1
    assert len({one.data_ptr() for one in given}) == 1


@torch.no_grad()
def test_layers_with_other_masks_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched("llama_gqa", "alibi", attn_implementation="sdpa")
    ids = tokens()
    near = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril().triu(-2)[None, None]

    def narrow(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": near}

    model.model.layers[1].self_attn.register_forward_pre_hook(narrow, with_kwargs=True)
    wide = torch.ones_like(near).tril()
    found = model(input_ids=ids, attention_mask=wide, use_cache=False).logits
    monkeypatch.setattr(CheckedLayer, "attend", lambda *_: None)
    torch.testing.assert_close(found, model(input_ids=ids, attention_mask=wide, use_cache=False).logits)


def test_a_large_bias_of_an_accelerator_is_computed_again_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blockwise.SIZES, True, blockwise.SIZES[False])
    numbers: list[int] = []
    weight = torch.ones(8, 1, 1, requires_grad=True)
    form = RowsForm(lambda start, stop, keys: (weight * torch.ones(stop - start, keys)).exp()[None], 1100, 1100, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: numbers.append(one.numel()) or one, lambda one: one):
        attend(form, 1100)
    assert max(numbers) < 2**20


@torch.no_grad()
def test_layers_with_biases_of_their_own_take_few_matrices(
    given: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sizes(monkeypatch, short_pairs=0, shared_numbers=2**20)
    model = patched("llama_gqa", "tisa", num_hidden_layers=9, attn_implementation="sdpa")
    found = model(input_ids=tokens()).logits
    assert 0 < len(given) < 5
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, model(input_ids=tokens()).logits)


@pytest.mark.on_cpu("other devices have other kernels")
@pytest.mark.parametrize("scheme", ["t5", "shaw"])
def test_training_a_learned_bias_takes_the_fused_kernel(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernel refuses a mask that requires gradients; the backward pass computes them itself."""
    set_sizes(monkeypatch, kept_probabilities=0)
    model = patched("llama_gqa", scheme, attn_implementation="sdpa").train()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    names = {event.name for event in recorded.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names


@pytest.mark.parametrize("scheme", ["t5", "shaw", "forget_gate"])
@pytest.mark.parametrize("padding", [False, True], ids=["", "padding"])
def test_kept_probabilities_give_the_same_gradients(
    scheme: str, padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many probabilities as the limit are kept. One more, and they are computed again."""
    model, ids = patched("llama_gqa", scheme, attn_implementation="sdpa").train(), tokens()
    mask = left_padding(ids.shape[1], 5 if padding else 0)
    heads, few = model.config.num_attention_heads, []
    original = block_attention.plain_attention
    monkeypatch.setattr(block_attention, "plain_attention", lambda *given: few.append(given) or original(*given))
    found = []
    for most in (ids.numel() * ids.shape[1] * heads, ids.numel() * ids.shape[1] * heads - 1):
        set_sizes(monkeypatch, kept_probabilities=most)
        found.append(gradients(model, model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss))
        assert len(few) == model.config.num_hidden_layers
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("scheme", "blocks", "compiled"),
    mostly_slow(
        itertools.product(["alibi", "sandwich", "t5", "kerple", "swin"], ["", "blocks"], ["", "compiled"]),
        lambda case: not case[2] or case[:2] in (("alibi", ""), ("t5", "blocks")),
    ),
)
def test_padding_before_a_text_has_the_same_gradient_in_all_kernels(
    scheme: str, blocks: str, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last token sees no key, and predicts the first token of the text. The weights of the bias are frozen."""
    if blocks:
        set_sizes(monkeypatch, short_pairs=0, bias_numbers=100)
    layers = 1 if compiled else 2
    model = patched("llama_gqa", scheme, attn_implementation="sdpa", num_hidden_layers=layers).train()
    model.position_encoding.requires_grad_(False)
    ids = tokens()
    mask = left_padding(ids.shape[1], 5)
    labels = ids.masked_fill(mask == 0, -100)
    found = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        torch.compiler.reset()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        with sdpa_kernel(kernel):
            loss = called(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
            found.append(gradients(model, loss))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_a_trained_bias_has_the_same_gradient_in_a_graph() -> None:
    """With padding before the text, whose last token sees no key and predicts the first token."""
    model = patched("llama_gqa", "t5", attn_implementation="sdpa", num_hidden_layers=1).train()
    ids = tokens()
    mask = left_padding(ids.shape[1], 5)
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}
    torch.compiler.reset()
    found = [gradients(model, call(**given).loss) for call in (model, torch.compile(model, backend="aot_eager"))]
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


def test_rows_that_a_block_computes_again_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks beyond `bias_numbers` are checkpointed. Rows from the first pass would have other saved tensors."""
    set_sizes(monkeypatch, short_pairs=10**6, kept_numbers=1, bias_numbers=1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 6, 4, generator=generator)
    vector = torch.randn(2, 11, generator=generator).requires_grad_()
    places = torch.arange(6)
    bias = vector[:, places - places[:, None] + 5].masked_fill(places > places[:, None], -torch.inf)
    plain = scaled_dot_product_attention(query, key, value, attn_mask=bias[None], scale=0.3).transpose(1, 2)
    form = FusedForm(vector, 6, 6)
    found = attended(form, query, key, value, scaling=0.3, is_causal=True)
    of_vector = [torch.autograd.grad(output.square().sum(), vector)[0] for output in (found, plain)]
    assert of_vector[1].abs().max() > 1e-2
    torch.testing.assert_close(*of_vector, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("feature", [{"softcap": 3.0}, {"s_aux": torch.zeros(2)}, {"output_attentions": True}], ids=str)
def test_features_of_stock_attention_are_left_to_it(feature: dict[str, Any]) -> None:
    asked: list[dict[str, Any]] = []

    def stock(
        module: nn.Module, query: Tensor, *heads: Any, position_bias: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        asked.append(options)
        return query.transpose(1, 2), None

    stock.__module__ = sdpa_attention_forward.__module__
    heads = torch.ones(1, 2, 6, 4)
    form = FusedForm(torch.zeros(2, 11), 6, 6)
    call = AttentionCall("sdpa", stock, None, (), {"is_causal": True} | feature)
    attention_with(call, form, nn.Module(), heads, heads)(nn.Module(), heads, heads, heads)
    assert asked
    assert all(options.items() >= feature.items() for options in asked)


@pytest.mark.parametrize("later", [torch.nan, torch.inf])
def test_numbers_at_hidden_keys_have_no_effect(later: float) -> None:
    """A scheme of one's own may compute the logarithm of a negative distance there."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)

    def output(number: float) -> Tensor:
        rows = torch.linspace(-1.0, 1.0, 36).view(1, 1, 6, 6).masked_fill(hidden, number)
        return attend(RowsForm(lambda start, stop, count: rows[:, :, start:stop, :count], 6, 6, 1))

    assert torch.equal(output(later), output(0.0))


def test_an_empty_batch_keeps_the_width_of_values() -> None:
    heads = torch.ones(0, 2, 3, 8)
    bias = torch.zeros(1, 2, 3, 3, requires_grad=True)
    for keeps in (True, False):
        found = block_attention.block_attention(heads, heads, heads[..., :4], bias, 0.3, None, keeps)
        assert found.shape == (0, 3, 2, 4)
