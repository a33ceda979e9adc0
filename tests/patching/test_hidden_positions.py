"""A position mechanism that discovery misses is detected by running the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
    rotate_half,
)
from transformers.pytorch_utils import Conv1D

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy import architectures
from tests.architectures.population import pair_named
from tests.architectures.tiny import WITHOUT_POSITIONS, tiny_model
from tests.matrix.running import patched, tokens
from tests.models import tiny
from tests.thinning import in_turn


def hidden_table() -> Any:
    model = patched("gpt2", None)
    model.transformer.wpe = nn.Sequential(model.transformer.wpe)
    return model


def without_table() -> Any:
    model = patched("gpt2", None)
    model.transformer.wpe = nn.Sequential()
    model.transformer.wpe.forward = lambda ids: torch.zeros(1, dtype=model.dtype)
    return model


def hidden_bias() -> Any:
    """A model without positions, whose first attention layer forgets its input by its place."""
    model = without_table()
    model.transformer.h[0].attn.c_attn.__class__ = Fading
    return model


class Fading(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.linspace(0.5, 1.0, x.shape[1], dtype=x.dtype).unsqueeze(-1)


def hidden_in_one_of_two_stacks() -> Any:
    model = tiny("BartModel").eval()
    table = model.decoder.embed_positions
    model.decoder.embed_positions = nn.Module()
    model.decoder.embed_positions.inner = table
    model.decoder.embed_positions.forward = table.forward
    return model


@torch.no_grad()
def test_a_declared_table_is_replaced_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = architectures.Architecture(tables=("wpe.0",))
    monkeypatch.setitem(architectures.declaration._ARCHITECTURES, "gpt2", declared)
    model, expected, ids = hidden_table(), patched("gpt2", "alibi"), tokens(1, 8)
    patch_model(model, "alibi")
    assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("name", ["causal-bloom", "masked-mpnet", "causal-xlnet", "masked-deberta[relative]"])
def test_a_mechanism_that_is_still_there_after_it_was_silenced_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a version of transformers in which what a declaration names is not what acts."""
    pair, declared = pair_named(name), architectures.declaration._ARCHITECTURES
    changed = {"silence": lambda stack, patches: None, "bias_arguments": ()}
    model = tiny_model(pair)
    monkeypatch.setitem(declared, pair.model_type, dataclasses.replace(declared[pair.model_type], **changed))
    with pytest.raises(UnsupportedError, match=r"was disabled, but .* it would remain active next to any scheme"):
        patch_model(model, "alibi")
    assert not hasattr(model, "position_encoding")


@pytest.mark.parametrize("name", ["causal-inkling_text", "causal-inkling2_text"])
def test_a_convolution_over_keys_is_no_position_mechanism(name: str) -> None:
    """It stays in the model beside any scheme, as a recurrent layer does."""
    model = tiny_model(pair_named(name))
    patch_model(model, "none")
    assert model.position_encoding.config.name == "none"


def test_a_method_that_is_to_be_silenced_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(pair_named("masked-mpnet")).to("meta")
    monkeypatch.delattr(type(model.mpnet.encoder), "compute_position_bias")
    with pytest.raises(UnsupportedError, match="MPNetEncoder has no 'compute_position_bias' to replace"):
        patch_model(model, "alibi")
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("model_type", sorted(WITHOUT_POSITIONS))
def test_architectures_without_positions_are_patched_as_before(model_type: str) -> None:
    model = tiny_model(pair_named(f"causal-{model_type}"))
    assert native_scheme(model).name == "none"
    patch_model(model, "alibi")
    patch_model(model, "rope", theta=100.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_causal_model_without_any_positions_has_none(dtype: torch.dtype) -> None:
    """Its second layer knows the order from the causal mask."""
    model = without_table().to(dtype)
    assert native_scheme(model).name == "none"
    patch_model(model, "alibi")


@pytest.mark.parametrize("name", ["DebertaV2ForMultipleChoice", "MPNetForMultipleChoice", "RoFormerForMultipleChoice"])
@torch.no_grad()
def test_models_of_several_choices_are_run_on_questions_with_choices(name: str) -> None:
    """They read `(batch, choices, length)`, and cut a plain text into choices of one token."""
    model = tiny(name, vocab_size=64).eval()
    choices = torch.arange(5, 5 + 2 * 3 * 7).view(2, 3, 7) % 64
    stock = model(input_ids=choices).logits
    assert stock.shape == (2, 3)
    patch_model(model, "alibi")
    patched_logits = model(input_ids=choices).logits
    assert not torch.allclose(patched_logits, stock)
    # Each choice is read as a separate text.
    assert torch.allclose(model(input_ids=choices[:, 1:2]).logits, patched_logits[:, 1:2], atol=1e-6)
    unpatch_model(model)
    assert torch.equal(model(input_ids=choices).logits, stock)


class Rotating(LlamaAttention):
    """Rotates without the rotary function of transformers, and has a name of its own for the cache."""

    rotates_by_itself = True

    def forward(
        self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, memory: Any = None, **_: Any
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        project = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (one(hidden_states).view(shape).transpose(1, 2) for one in project)
        cosine, sine = (one.unsqueeze(1) for one in position_embeddings)
        if self.rotates_by_itself:
            query, key = (one * cosine + rotate_half(one) * sine for one in (query, key))
        else:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if memory is not None:
            key, value = memory.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(output.flatten(-2)), weights


class Foreign(nn.Module):
    """Attention of a class that does not look like one."""

    def __init__(self, inner: LlamaAttention) -> None:
        super().__init__()
        self.inner = inner.o_proj

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        return self.inner(hidden_states.cumsum(1)), None


class OfTorch(nn.Module):
    """A layer of torch in place of one of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(width, 2, width, batch_first=True)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self.inner(hidden_states)


def numbering(kind: Any) -> type:
    """A class that adds positions to what it returns."""

    def forward(self: Any, given: Any, **kwargs: Any) -> Any:
        output = kind.forward(self, given, **kwargs)
        return output + 4 * torch.arange(given.shape[1]).sin().unsqueeze(-1).to(output.dtype)

    return type("Numbering", (kind,), {"forward": forward})


class Outside(LlamaForCausalLM):
    """Adds positions before the stack."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded + torch.arange(input_ids.shape[1]).unsqueeze(-1), **kwargs)


class Layer(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        places = torch.arange(hidden_states.shape[1]).sin().unsqueeze(-1).to(hidden_states.dtype)
        return super().forward(hidden_states + places, **kwargs)


class BetweenLayers(LlamaModel):
    """Adds positions to what a layer returns."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        hidden_states, places = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1])
        phases = self.rotary_emb(hidden_states, places.unsqueeze(0))
        mask = create_causal_mask(self.config, hidden_states, None, None)
        for index, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states, attention_mask=mask, position_embeddings=phases)
            if index == self.after:
                hidden_states = hidden_states + 4 * places.sin().unsqueeze(-1).to(hidden_states.dtype)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


def between_layers(after: int) -> Any:
    model = llama("model", BetweenLayers)
    model.model.after = after
    return model


def own_function(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    places = torch.arange(key.shape[2])
    near = -(places - places[-query.shape[2] :].unsqueeze(1)).abs().to(query.dtype)
    return eager_attention_forward(module, query, key, value, near if mask is None else mask + near, **kwargs)


def llama(path: str = "", kind: type | None = None) -> Any:
    """A Llama, one of whose modules may be of a custom class."""
    torch.manual_seed(0)
    model = tiny("LlamaForCausalLM", attn_implementation="eager").eval()
    if kind is not None:
        model.get_submodule(path).__class__ = kind
    return model


def with_foreign_attention() -> Any:
    model = llama()
    model.model.layers[1].self_attn = Foreign(model.model.layers[1].self_attn)
    return model


def with_shared_attention() -> Any:
    model = llama()
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    return model


def with_layers_of_torch(model: Any, first: int) -> Any:
    for index in range(first, 2):
        model.base_model.layers[index] = OfTorch(model.config.hidden_size)
    return model


def with_own_function() -> Any:
    AttentionInterface.register("own_function", own_function)
    model = llama()
    model.config._attn_implementation = "own_function"
    return model


ATTENTION = "model.layers.1.self_attn"
IN_A_VIT = r"layers\.\d\.inner\.self_attn .*(no scheme would act|did not run)"
FIRST_INPUT = "input of its first layer depends on the position"
#: Changes to a model by other code, and words of the refusal.
HIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a table": (hidden_table, r"wpe\.0.*register_architecture"),
    "a bias": (hidden_bias, r"the output of h\.0\.attn \(GPT2Attention\) depends"),
    "a table in one of two stacks": (hidden_in_one_of_two_stacks, "No position table.* in this BartDecoder"),
    "rotating": (lambda: llama(ATTENTION, Rotating), r"output of layers\.1\.self_attn \(Rotating\)"),
    "foreign": (
        with_foreign_attention,
        r"layers\.1\.self_attn \(Foreign, defined in .*\) is not attention that hf_posenc recognises",
    ),
    "of torch": (
        lambda: with_layers_of_torch(llama(), 1),
        r"layers\.1\.inner\.self_attn \(MultiheadAttention, .*, so no scheme would act in it",
    ),
    "of torch, all": (lambda: with_layers_of_torch(llama(), 0), r"as causal, but a run .* is bidirectional"),
    "of torch in a ViT": (lambda: with_layers_of_torch(tiny("ViTModel"), 1), IN_A_VIT),
    "of torch in a ViT, all": (lambda: with_layers_of_torch(tiny("ViTModel"), 0), IN_A_VIT),
    "layer": (lambda: llama("model.layers.1", Layer), r"input of layers\.1\.self_attn depends on the position"),
    "after attention": (
        lambda: llama("model.layers.1", numbering(LlamaDecoderLayer)),
        r"output of a layer \(Numbering with",
    ),
    "between layers": (lambda: between_layers(0), "the input of a layer after the first depends on the position"),
    "after layers": (lambda: between_layers(1), "its output depends on the position"),
    "network": (
        lambda: llama("model.layers.0.mlp", numbering(LlamaMLP)),
        r"output of a layer \(LlamaDecoderLayer\) depends",
    ),
    "embeddings": (lambda: llama("model.embed_tokens", numbering(nn.Embedding)), FIRST_INPUT),
    "outside": (lambda: llama("", Outside), FIRST_INPUT),
    "shared attention": (with_shared_attention, "used in several layers"),
    "function": (with_own_function, r"The attention function 'own_function' was registered by other code"),
}
TRIED = [("none", torch.float32), ("alibi", torch.bfloat16), ("native", torch.float32)]


@pytest.mark.parametrize(("hidden", "tried"), in_turn(HIDDEN, TRIED), ids=str)
def test_hidden_positions_are_refused(hidden: str, tried: tuple[str, torch.dtype]) -> None:
    """They would act next to any scheme, and are not what the native scheme says."""
    build, message = HIDDEN[hidden]
    scheme, dtype = tried
    model = build().to(dtype)
    with pytest.raises(UnsupportedError, match=message):
        patch_model(model, scheme)
    assert not hasattr(model, "position_encoding")
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    # Two of these models come with forwards of their own.
    forwards = {path for path, module in model.named_modules() if "forward" in module.__dict__}
    assert forwards <= {"transformer.wpe", "decoder.embed_positions"}


def test_the_forward_of_a_class_that_other_code_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rotating, "rotates_by_itself", False)
    monkeypatch.setattr(LlamaAttention, "rotates_by_itself", True, raising=False)
    stock = LlamaAttention.forward

    @functools.wraps(stock)
    def wrapped(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, hidden_states + 1, *args, **kwargs)

    class Wrapper:
        def __get__(self, module: Any, kind: type) -> Any:
            return self if module is None else functools.partial(wrapped, module)

    for other in (wrapped, functools.update_wrapper(Wrapper(), stock)):  # type: ignore[type-var]
        monkeypatch.setattr(LlamaAttention, "forward", other)
        with pytest.raises(UnsupportedError, match=r"LlamaAttention .* is wrapped by code of .*test_hidden_positions"):
            patch_model(llama(), "alibi")
    monkeypatch.setattr(LlamaAttention, "forward", Rotating.forward)
    with pytest.raises(UnsupportedError, match=r"LlamaAttention with the forward .*Rotating\.forward\) depends"):
        patch_model(llama(), "alibi")


@torch.no_grad()
def test_other_code_that_takes_positions_from_transformers_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rotating, "rotates_by_itself", False)
    ids = tokens(1, 8)
    own, stock = llama(ATTENTION, Rotating), llama()
    assert native_scheme(own) == native_scheme(stock)
    assert torch.allclose(patch_model(own, "alibi")(ids).logits, patch_model(stock, "alibi")(ids).logits, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 3])
@torch.no_grad()
def test_a_window_in_which_tokens_have_no_order_to_see_is_no_position(window: int) -> None:
    layers = ["full_attention", "sliding_attention"]
    model = tiny("Gemma3TextModel", num_hidden_layers=2, layer_types=layers, sliding_window=window).eval()
    expected, ids = model(tokens(1, 8)).last_hidden_state, tokens(1, 8)
    patch_model(model, native_scheme(model))
    assert torch.allclose(model(ids).last_hidden_state, expected, atol=1e-5)
    patch_model(model, "none")
    assert not torch.allclose(model(ids).last_hidden_state, expected, atol=1e-3)
