"""Forwards, layers and stacks that other code replaces, moves, drops or copies after a patch.

The scheme is still computed, or the next call and the next save name what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from hf_posenc import (
    PositionEncodingError,
    UnsupportedError,
    inspect_model,
    patch_model,
    save_position_adapter,
)
from tests.kits.decoding import decoded
from tests.matrix.running import distance, freshly_compiled, patched, tokens
from tests.thinning import in_turn

pytestmark = pytest.mark.usefixtures("without_gradients")
ROTARY = "apply_rotary_pos_emb"


def own_attention(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """An attention without a scheme: the mean of the values."""
    value = self.v_proj(hidden_states).mean(1, keepdim=True).repeat(1, hidden_states.shape[1], 2)
    return self.o_proj(value), None


class Beside(nn.Module):
    """A module around an attention that computes attention itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return own_attention(self.inner, hidden_states)


class Called(LlamaAttention):
    __call__ = own_attention


class Own(nn.Module):
    """A custom attention or layer."""

    def __init__(self, width: int, *, is_layer: bool) -> None:
        super().__init__()
        self.inner, self.is_layer = nn.Linear(width, width), is_layer

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        output = self.inner(hidden_states)
        return output if self.is_layer else (output, None)


class SomeTokens(Beside):
    """A layer that sees some of the tokens, as in a mixture of depths."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        phases = tuple(phase[:, ::2] for phase in kwargs["position_embeddings"])
        some = self.inner(hidden_states[:, ::2], position_embeddings=phases, attention_mask=None)
        return hidden_states.index_copy(1, torch.arange(0, hidden_states.shape[1], 2), some)


def put_beside(layer: Any) -> None:
    layer.self_attn = Beside(layer.self_attn)


def call_instead(layer: Any) -> None:
    layer.self_attn.__class__ = Called


def layer_without_its_attention(layer: Any) -> None:
    layer.forward = lambda hidden_states, **_: own_attention(layer.self_attn, hidden_states)[0]


def in_layers(change: Callable[[Any], None], which: slice) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        for layer in model.model.layers[which]:
            change(layer)

    return apply


def many_helpers(attention: Any) -> Any:
    """Functions that name each other, each of which is searched once."""
    script: dict[str, Any] = {"__name__": "a_script"}
    names = [f"helper_{number}" for number in range(60)]
    exec("\n".join(f"def {name}(*args, **kwargs):\n    return [{', '.join(names)}]" for name in names), script)
    return script[names[0]]


def rebuilt(module: Any, config: Any, index: int = 1) -> Any:
    """A module made from its class and its weights."""
    new = type(module)(config, index).eval()
    new.load_state_dict(module.state_dict())
    return new


def put_a_stock_layer(model: Any) -> None:
    model.model.layers[1] = rebuilt(model.model.layers[1], model.config)


def put_stock_attention(model: Any) -> None:
    layer = model.model.layers[1]
    layer.self_attn = rebuilt(layer.self_attn, model.config)


def add_a_layer(model: Any) -> None:
    model.model.layers.append(rebuilt(model.model.layers[0], model.config, 0))


def remove_forward(layer: Any) -> None:
    del layer.self_attn.forward


def put_own_attention(layer: Any) -> None:
    layer.self_attn = Own(32, is_layer=False)


def put_attention_of_buffers(layer: Any) -> None:
    """Its weights are no parameters."""
    put_own_attention(layer)
    inner = layer.self_attn.inner
    weight = inner.weight
    del inner.weight
    inner.register_buffer("weight", weight.detach())
    inner.register_parameter("bias", None)


def put_own_layers(model: Any) -> None:
    for index in range(len(model.model.layers)):
        model.model.layers[index] = Own(32, is_layer=True)


def move_a_layer_here(model: Any) -> None:
    model.model.layers[0] = patched("llama_gqa", "t5").model.layers[0]


def exchange_the_base(model: Any, scheme: str | None = None) -> None:
    model.model = patched("llama_gqa", scheme).model


class Change(NamedTuple):
    """A change of a patched Llama by other code.

    Args:
        apply: does it.
        says: what the refusal says.
        saving: what the refusal of saving says; `None` where only a run shows what was changed.
        schemes: under which it is tried.
    """

    apply: Callable[[Any], Any]
    says: str
    saving: str | None
    schemes: tuple[str, ...] = ("alibi", "rope", "none")


def replaced(make: Callable[[Any], Any], path: str = "layers.0.self_attn", hooked: bool = False) -> Change:
    """Another forward of a module, which may be set inside a hook of accelerate."""

    def apply(model: Any) -> None:
        module = model.model.get_submodule(path)
        if hooked:
            add_hook_to_module(module, ModelHook())
        module.forward = make(module)

    return Change(apply, "was replaced after patch_model", "was replaced after patch_model", ("alibi", "rope"))


ALL, FIRST, LAST = slice(None), slice(1), slice(1, None)
BYPASSED = r"did not run in this call|unlike that of other layers|replaced an attention module"
UNPATCHED, SITE = r"layers\.\d\.self_attn.*[Cc]all patch_model again", r"layers\.\d\.self_attn"
FOREIGN, OTHERS = "replaced an attention module", ("alibi", "learned", "none", "native")
EXCHANGED, FIRST_LAYER = "its LlamaModel was replaced after patch_model", "no longer the first layer"
MOVED = "was moved here from another patched model"
CHANGES: dict[str, Change] = {
    "an attention beside, in all layers": Change(in_layers(put_beside, ALL), BYPASSED, None),
    "an attention beside, in the last layer": Change(in_layers(put_beside, LAST), BYPASSED, None),
    "an attention beside, in the first layer": Change(in_layers(put_beside, FIRST), BYPASSED, None),
    "a class that is called, in all layers": Change(in_layers(call_instead, ALL), BYPASSED, None),
    "a class that is called, in the last layer": Change(in_layers(call_instead, LAST), BYPASSED, None),
    "layers without their attention": Change(in_layers(layer_without_its_attention, ALL), BYPASSED, None),
    "a layer without its attention": Change(in_layers(layer_without_its_attention, LAST), BYPASSED, None),
    "a forward on the instance": replaced(own_attention.__get__),
    "a partial": replaced(functools.partial(functools.partial, own_attention)),
    "a forward inside a hook": replaced(own_attention.__get__, hooked=True),
    "a forward of many helpers": replaced(many_helpers),
    "the forward of the rotary module": replaced(lambda rotary: type(rotary).forward.__get__(rotary), "rotary_emb"),
    "a stock layer": Change(put_a_stock_layer, UNPATCHED, SITE, ("alibi", "sinusoidal")),
    "stock attention": Change(put_stock_attention, UNPATCHED, SITE, ("alibi",)),
    "one layer more": Change(add_a_layer, UNPATCHED, SITE, ("alibi",)),
    "forwards that were removed": Change(in_layers(remove_forward, ALL), UNPATCHED, SITE, ("alibi",)),
    "an attention of one's own": Change(in_layers(put_own_attention, LAST), FOREIGN, FOREIGN, OTHERS),
    "attention of one's own": Change(in_layers(put_own_attention, ALL), FOREIGN, FOREIGN, OTHERS),
    "an attention whose weights are buffers": Change(
        in_layers(put_attention_of_buffers, LAST), FOREIGN, FOREIGN, OTHERS
    ),
    "layers of one's own": Change(put_own_layers, FOREIGN, FOREIGN, OTHERS),
    "a layer of another model": Change(move_a_layer_here, MOVED, MOVED, ("alibi", "t5")),
    "the first layer is dropped": Change(
        lambda model: model.model.layers.pop(0), FIRST_LAYER, FIRST_LAYER, ("sinusoidal", "learned")
    ),
    "a stock base": Change(
        exchange_the_base, EXCHANGED, "uses its stock positions, but its config|no scheme to save", ("alibi",)
    ),
    "a patched base": Change(
        lambda model: exchange_the_base(model, "t5"),
        EXCHANGED,
        "LlamaModel was replaced|not saved or exported",
        ("alibi",),
    ),
}
CELLS = [(name, scheme) for name, change in CHANGES.items() for scheme in change.schemes]


@pytest.mark.parametrize(("cell", "called"), in_turn(CELLS, [False, True]), ids=str)
def test_a_call_and_a_save_name_what_was_changed(cell: tuple[str, str], called: bool, tmp_path: Path) -> None:
    change, model, ids = CHANGES[cell[0]], patched("llama_gqa", cell[1]), tokens(1, 8)
    if called:
        model(ids)
    change.apply(model)
    for _ in range(2):
        with pytest.raises(PositionEncodingError, match=change.says):
            model(ids, use_cache=False)
    if change.saving is not None:
        for save in (model.save_pretrained, lambda folder: save_position_adapter(model, folder)):
            with pytest.raises(PositionEncodingError, match=change.saving):
                save(tmp_path / "folder")
        assert not (tmp_path / "folder").exists()
    with pytest.raises(PositionEncodingError, match=change.says):
        model(ids, use_cache=False)


OF_A_CLASS = [(LlamaAttention, "forward"), (modeling_llama, "eager_attention_forward")]


@pytest.mark.parametrize(("place", "scheme"), in_turn([*OF_A_CLASS, (modeling_llama, ROTARY)], ["alibi", "rope"]))
def test_code_that_was_set_on_the_class_is_named(
    place: tuple[Any, str], scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(1, 8)
    monkeypatch.setattr(*place, own_attention)
    for action in (lambda: model(ids), lambda: model.save_pretrained(tmp_path / "folder")):
        with pytest.raises(UnsupportedError, match="was replaced after patch_model"):
            action()
    assert "was replaced" in model.position_encoding.record.agrees(model)


@pytest.mark.parametrize("name", [name for name in CHANGES if "beside" in name or "that is called" in name])
def test_a_model_that_bypasses_its_attention_is_not_patched(name: str) -> None:
    model = patched("llama_gqa", None)
    CHANGES[name].apply(model)
    with pytest.raises(UnsupportedError, match=CHANGES[name].says):
        patch_model(model, "alibi")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "compiled_before"),
    [
        ("an attention beside, in all layers", True),
        ("a stock layer", False),
        ("a patched base", True),
    ],
)
def test_a_graph_names_what_was_changed(name: str, compiled_before: bool) -> None:
    model, ids = patched("llama_gqa", "alibi", num_hidden_layers=2 if name == "a stock layer" else 1), tokens(1, 4)
    run = freshly_compiled(model)
    if compiled_before:
        assert torch.allclose(run(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=1e-5)
    CHANGES[name].apply(model)
    with pytest.raises(Exception, match=CHANGES[name].says):
        run(ids, use_cache=False)


@pytest.mark.parametrize("scheme", [None, "t5"])
@torch.enable_grad()
def test_an_encoder_of_another_model_is_not_called_or_saved(scheme: str | None, tmp_path: Path) -> None:
    model = patched("bart", "alibi")
    model.model.encoder = patched("bart", scheme).model.encoder
    message = "its BartEncoder was replaced after patch_model"
    ids = tokens(1, 4)
    for action in (lambda: model(ids, decoder_input_ids=ids), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(UnsupportedError, match=message):
            action()
    if scheme is None:
        assert message in inspect_model(model).disagreement


@pytest.mark.parametrize(("architecture", "path"), [("gpt2", "h.1.attn"), ("bert", "encoder.layer.1.attention")])
@pytest.mark.parametrize("scheme", ["alibi", "learned", "native"])
@torch.enable_grad()
def test_another_attention_is_refused_in_other_architectures(architecture: str, path: str, scheme: str) -> None:
    model = patched(architecture, scheme)
    model.base_model.set_submodule(path, Own(32, is_layer=False))
    with pytest.raises(PositionEncodingError, match="replaced an attention module"):
        model(tokens(1, 8))


def test_a_stock_table_in_a_patched_model_is_named() -> None:
    model = patched("gpt2", "alibi")
    model(tokens(1, 8))
    model.transformer.wpe = nn.Embedding(64, 32)
    with pytest.raises(UnsupportedError, match=r"wpe \(Embedding\)"):
        model(tokens(1, 8))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("scheme", ["native", "alibi", "forget_gate", "learned", "none"])
def test_tokens_that_a_layer_does_not_see_leave_the_positions_of_the_others_unknown(scheme: str, layer: int) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(1, 8)
    model.model.layers[layer] = SomeTokens(model.model.layers[layer])
    if scheme == "none" or (scheme, layer) == ("learned", 1):
        model(ids, use_cache=False)
        return
    with pytest.raises(UnsupportedError, match="given 4 of the 8 tokens"):
        model(ids, use_cache=False)


def eager(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return eager_attention_forward(module, query, key, value, mask, **kwargs)


def fading(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return eager(module, query, key, value * torch.linspace(0, 1, value.shape[2])[:, None], mask, **kwargs)


def test_an_attention_function_chosen_after_the_patch_has_no_positions(tmp_path: Path) -> None:
    model, ids = patched("llama_gqa", "rope"), tokens(1, 8)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    wrapped = functools.wraps(eager_attention_forward)(fading)
    for name, function in (("of_a_user", eager), ("fading", fading), ("wrapped", wrapped)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, eager_mask)
    model.set_attn_implementation("of_a_user")
    assert torch.equal(model(ids).logits, expected)
    AttentionInterface.register("of_a_user", fading)
    with pytest.raises(UnsupportedError, match="'of_a_user' was registered by other code"):
        model(ids)
    for name in ("fading", "wrapped"):
        model.set_attn_implementation(name)
        for other in (model, AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)):
            with pytest.raises(UnsupportedError, match=f"'{name}' was registered by other code"):
                other(ids)


def test_no_advice_to_use_the_function_that_cannot_add_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", eager_attention_forward)
    model = patched("llama_gqa", "alibi", attn_implementation="sdpa")
    with pytest.raises(UnsupportedError, match=r'Use model.set_attn_implementation with "flex_attention" or "eager"'):
        model(tokens(1, 8))


def half_as_large(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return tuple(x / 2 for x in apply_rotary_pos_emb(q, k, cos, sin))


def of_the_query(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return apply_rotary_pos_emb(q, k, cos, sin)[0], k


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Another way to write the rotation of transformers, as in a kernel."""
    halves = torch.complex(*(x.float() for x in (cos, sin)))[:, None, :, : q.shape[-1] // 2]
    turned = (torch.view_as_complex(x.float().unflatten(-1, (2, -1)).mT.contiguous()) * halves for x in (q, k))
    return tuple(torch.view_as_real(x).mT.flatten(-2).to(q.dtype) for x in turned)


def test_a_rotary_function_of_other_code_is_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme replaces it, and what else it does."""
    ids = tokens(1, 8)
    for function in (half_as_large, of_the_query):
        monkeypatch.setattr(modeling_llama, ROTARY, function)
        for scheme in ("alibi", "rope", "native"):
            with pytest.raises(
                UnsupportedError, match=f"The rotary function {__name__}.{function.__name__} (does|maps)"
            ):
                patched("llama_gqa", scheme)
    monkeypatch.undo()
    stock = patched("llama_gqa", None)(ids).logits
    monkeypatch.setattr(modeling_llama, ROTARY, interleaved)
    assert distance(patched("llama_gqa", "native")(ids).logits, stock) <= 1e-4


@pytest.mark.parametrize("scheme", ["rope", "alibi", "fire", "ssmax", "pope", "forget_gate"])
def test_a_wrapper_of_an_attention_function_is_called(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name and the module of the function that it wraps."""
    model, ids = patched("llama_gqa", scheme, attn_implementation="sdpa"), tokens(2, 12)

    @functools.wraps(sdpa_attention_forward)
    def without_the_last_head(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return torch.cat((output[:, :, :-1], torch.zeros_like(output[:, :, -1:])), dim=2), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", without_the_last_head)
    found = [model(ids, use_cache=False).logits, decoded(model, ids, None, [5, 1, 1, 5])]
    monkeypatch.undo()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:, -8:] = 0
    expected = model(ids, use_cache=False).logits
    assert max(distance(one, expected) for one in found) <= 1e-4
