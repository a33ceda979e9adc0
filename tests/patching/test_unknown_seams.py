"""Names, signatures and shapes that another version of transformers, or a custom layer, may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy.rotary_functions import rotary_call
from tests.kits.decoding import decoded
from tests.matrix.running import patched, tokens
from tests.patching.test_hidden_positions import Rotating
from tests.thinning import in_turn


class OwnAttention(Rotating):
    rotates_by_itself = False


class OwnLayer(modeling_llama.LlamaDecoderLayer):
    """Calls its attention with one name for the cache."""

    name = "memory"

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        cache = {self.name: kwargs.get("cache", kwargs.get("past_key_values"))}
        normed = self.input_layernorm(hidden_states)
        output, _ = self.self_attn(normed, kwargs["position_embeddings"], attention_mask, **cache)
        hidden_states = hidden_states + output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LayerOfAnEarlierVersion(OwnLayer):
    """Since transformers 5.24 a decorator of the attention renames this."""

    name = "past_key_values"


class RotaryTable(nn.Module):
    """By its name a rotary module; it stores no frequencies."""

    def __init__(self, inner: nn.Module, rows: int = 64) -> None:
        super().__init__()
        cos, sin = inner(torch.zeros(1, 1, 1), torch.arange(rows).unsqueeze(0))
        self.register_buffer("cos_table", cos[0], persistent=False)
        self.register_buffer("sin_table", sin[0], persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_table[position_ids].to(x.dtype), self.sin_table[position_ids].to(x.dtype)


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "classes"),
    in_turn(["native", "alibi", "forget_gate", "pope"], [(OwnLayer, OwnAttention), (LayerOfAnEarlierVersion, None)]),
)
def test_a_cache_is_found_whatever_its_argument_is_called(scheme: str, classes: tuple[Any, Any]) -> None:
    model = patched("llama_gqa", None)
    for layer in model.model.layers:
        layer.__class__, layer.self_attn.__class__ = classes[0], classes[1] or type(layer.self_attn)
    ids = tokens(1, 12)
    patch_model(model, scheme)
    found = decoded(model, ids, DynamicCache(), [7, 1, 4])
    # Sums in another order.
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=0, atol=1e-4)


@torch.no_grad()
def test_phases_of_a_table_show_the_frequencies() -> None:
    model, ids = patched("llama_gqa", None), tokens(1, 12)
    expected = model(ids).logits
    model.model.rotary_emb = RotaryTable(model.model.rotary_emb)
    found = native_scheme(model)
    assert found.name == "rope"
    torch.testing.assert_close(patch_model(model, found)(ids).logits, expected, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("row", [5, 40])
def test_a_table_that_is_no_rotation_is_refused_with_its_module(row: int) -> None:
    model = patched("llama_gqa", None)
    model.model.rotary_emb = RotaryTable(model.model.rotary_emb)
    model.model.rotary_emb.cos_table[row:].mul_(-1)
    with pytest.raises(UnsupportedError, match=f"no inverse frequencies.* read in {__name__}, which"):
        native_scheme(model)
    before = model(tokens(1, 4)).logits
    assert not torch.equal(patch_model(model, "alibi")(tokens(1, 4)).logits, before)


class OwnRotary(nn.Module):
    """Stores the frequencies that stock stores, and may compute other phases."""

    def __init__(self, inner: nn.Module, angle: Any, factor: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inner.inv_freq.clone(), persistent=False)
        self.angle, self.factor = angle, factor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (self.angle(position_ids.float()).unsqueeze(-1) * self.inv_freq).repeat(1, 1, 2)
        return angles.cos() * self.factor, angles.sin() * self.factor


@torch.no_grad()
@pytest.mark.parametrize(("right", "angle", "factor"), [
    (True, lambda ids: ids, 1.3),
    (True, lambda ids: ids + 3, 1.0),
    (False, lambda ids: ids / 2, 1.0),
    (False, lambda ids: -ids, 1.0),
    (False, lambda ids: ids.clamp(max=500), 1.0),
    (False, lambda ids: (ids + 1).log(), 1.0),
])  # fmt: skip
def test_native_is_what_a_rotary_module_computes_and_not_what_it_stores(right: bool, angle: Any, factor: float) -> None:
    model, ids = patched("llama_gqa", None), tokens(1, 12)
    model.model.rotary_emb = OwnRotary(model.model.rotary_emb, angle, factor)
    expected = model(ids).logits
    if right:
        torch.testing.assert_close(patch_model(model, "native")(ids).logits, expected, rtol=0, atol=1e-4)
        return
    with pytest.raises(UnsupportedError, match=f"OwnRotary stores other inverse.* read in {__name__}, which"):
        patch_model(model, "native")


class TripledTable(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids)


def test_native_is_what_a_table_returns_and_not_what_it_stores() -> None:
    model = patched("gpt2", None)
    model.transformer.wpe.__class__ = TripledTable
    with pytest.raises(UnsupportedError, match="A table or a setting of the mechanism is unusual"):
        patch_model(model, "native")


def test_a_rotary_function_that_cannot_be_read_is_refused_with_its_module() -> None:
    def rotate(numbers: Tensor, angle: Tensor) -> Tensor:
        return numbers * angle

    with pytest.raises(UnsupportedError, match=f"no argument with the name of a query.* read in {__name__}, which"):
        rotary_call(rotate)


def rotates_with_and_without_a_batch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As MiniMax-M3-VL does: without a batch, phases `(tokens, width)` meet `(tokens, heads, width)`."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    return q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin


def test_a_function_of_two_conventions_is_read_by_the_shapes_of_the_call() -> None:
    call = rotary_call(rotates_with_and_without_a_batch)
    query = torch.zeros(5, 3, 8)
    phases = torch.ones(5, 8)
    assert call.tensors((query, query, phases, phases), {})[2] == 1
    assert call.tensors((), {"q": query, "k": query, "cos": phases, "sin": phases})[2] == 1
    batched, of_batch = torch.zeros(1, 3, 5, 8), torch.ones(1, 5, 8)
    assert call.tensors((batched, batched, of_batch, of_batch), {})[2] == 2


def test_what_is_read_in_transformers_is_refused_with_the_version() -> None:
    with pytest.raises(UnsupportedError, match=f"which axis .* read in transformers {transformers.__version__}"):
        rotary_call(modeling_llama.rotate_half)


@torch.no_grad()
def test_layers_may_hold_the_rotary_module_of_their_stack() -> None:
    """As before transformers 4.48."""
    model, ids = patched("llama_gqa", None), tokens(1, 12)
    expected = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
    for scheme in ("native", "alibi"):
        found = patch_model(model, scheme)(ids).logits
        torch.testing.assert_close(found, expected if scheme == "native" else patched("llama_gqa", scheme)(ids).logits)
    assert torch.equal(unpatch_model(model)(ids).logits, expected)


@torch.no_grad()
def test_attention_may_be_compiled_alone() -> None:
    model, ids = patched("llama_gqa", None), tokens(1, 12)
    model.model.layers[0].self_attn = torch.compile(model.model.layers[0].self_attn, backend="eager")
    torch.testing.assert_close(patch_model(model, "alibi")(ids).logits, patched("llama_gqa", "alibi")(ids).logits)
