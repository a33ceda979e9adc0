"""Layers and stacks that are moved, dropped, copied or exchanged after a patch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_posenc import (
    PositionEncodingError,
    UnsupportedError,
    inspect_model,
    list_schemes,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.matrix.running import patched, tokens
from tests.patching.test_record import assert_loads


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
@torch.no_grad()
def test_a_layer_of_another_patched_model_is_refused(scheme: str, tmp_path: Path) -> None:
    model, other, ids = patched("llama_gqa", scheme), patched("llama_gqa", "t5"), tokens(1, 8)
    model(ids)
    model.model.layers[0] = other.model.layers[0]
    for action in (lambda: model(ids), lambda: model.save_pretrained(tmp_path / "folder")):
        with pytest.raises(UnsupportedError, match="was moved here from another patched model"):
            action()
    unpatch_model(other)
    patch_model(model, scheme)
    model(ids)


@pytest.mark.parametrize("scheme", [None, "t5"])
def test_an_encoder_of_another_model_is_not_saved_with_the_scheme_of_this_one(
    scheme: str | None, tmp_path: Path
) -> None:
    model = patched("bart", "alibi")
    model.model.encoder = patched("bart", scheme).model.encoder
    message = "its BartEncoder was exchanged after patch_model"
    for action in (
        lambda: model(tokens(1, 4), decoder_input_ids=tokens(1, 4)),
        lambda: model.save_pretrained(tmp_path),
    ):
        with pytest.raises(UnsupportedError, match=message):
            action()
    if scheme is None:
        assert message in inspect_model(model).disagreement


def test_a_stock_base_under_the_config_of_a_patched_model_is_named(tmp_path: Path) -> None:
    model = patched("llama_gqa", "alibi")
    model.model = patched("llama_gqa", None).model
    message = "it uses its stock positions, but its config names the scheme 'alibi'"
    with pytest.raises(UnsupportedError, match=message):
        model.save_pretrained(tmp_path)
    assert message in inspect_model(model).disagreement


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scheme", [None, "t5"])
@torch.no_grad()
def test_a_base_that_was_exchanged_is_noticed_at_the_next_call(scheme: str | None, compiled: bool) -> None:
    model, other, ids = patched("llama_gqa", "alibi"), patched("llama_gqa", scheme), tokens(1, 4)
    run = torch.compile(model, backend="eager") if compiled else model
    expected, own = run(ids).logits, model.model
    model.model = other.model
    with pytest.raises(UnsupportedError, match="its LlamaModel was exchanged after patch_model"):
        run(ids)
    other(ids)
    model.base_before = own
    with pytest.raises(UnsupportedError, match="its LlamaModel was exchanged"):
        run(ids)
    del model.base_before
    model.model = own
    twin = copy.deepcopy(model)
    assert torch.equal(run(ids).logits, expected)
    twin.model = other.model
    with pytest.raises(UnsupportedError, match="its LlamaModel was exchanged"):
        pickle.loads(pickle.dumps(twin))(ids)
    unpatch_model(model)
    model.model = patched("llama_gqa", None).model
    model(ids)


class Wrapper(nn.Module):
    """Around a module, as FSDP puts one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@torch.no_grad()
def test_a_wrapper_around_a_base_is_no_exchange() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 4)
    expected = model(ids).logits
    model.model = Wrapper(model.model)
    assert torch.equal(model(ids).logits, expected)


def _moved(model: Any, order: list[int]) -> None:
    model.model.layers = nn.ModuleList([model.model.layers[index] for index in order])
    model.config.num_hidden_layers = len(order)


@pytest.mark.parametrize("order", [[1, 0], [1], [0, 1, 0]], ids=["swapped", "dropped", "repeated"])
@pytest.mark.parametrize("scheme", [{"scheme": "alibi"}, {"scheme": "t5"}, {"scheme": "forget_gate"}, {
    "scheme": "schedule", "layers": [{"scheme": "none"}, {"scheme": "alibi"}]
}], ids=lambda scheme: scheme["scheme"])  # fmt: skip
@torch.no_grad()
def test_a_model_with_moved_layers_is_loaded_as_it_is_or_not_saved(
    scheme: Any, order: list[int], tmp_path: Path
) -> None:
    model, ids = patched("llama_gqa", None), tokens(1, 8)
    patch_model(model, scheme)
    for parameter in model.model.position_encoding.parameters():
        parameter.normal_()
    _moved(model, order)
    expected = model(ids, use_cache=False).logits
    # transformers itself saves no layer twice.
    refusal = r"Call patch_model again" if scheme["scheme"] in ("schedule", "forget_gate") else "shared tensors"
    if refusal != "shared tensors" or order == [0, 1, 0]:
        with pytest.raises((UnsupportedError, RuntimeError), match=refusal):
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    assert_loads(tmp_path, expected, ids)


@pytest.mark.parametrize("scheme", sorted({*list_schemes()} & {
    "alibi", "t5", "fire", "forget_gate", "cope", "learned", "sinusoidal", "rope", "none", "kerple"
}))  # fmt: skip
@torch.no_grad()
def test_moved_layers_keep_their_own_parameters_when_the_scheme_is_placed_again(scheme: str) -> None:
    model, ids = patched("llama_gqa", scheme, num_hidden_layers=3), tokens(1, 8)
    for parameter in model.model.position_encoding.parameters():
        parameter.normal_()
    _moved(model, [2, 0])
    if scheme in ("learned", "sinusoidal"):
        with pytest.raises(UnsupportedError, match="no longer the first layer"):
            model(ids, use_cache=False)
        additive = [*model.model.position_encoding.parameters()]
        patch_model(model, scheme)
        assert all(map(torch.equal, additive, model.model.position_encoding.parameters()))
        return
    expected = model(ids, use_cache=False).logits
    patch_model(model, scheme)
    assert torch.equal(model(ids, use_cache=False).logits, expected)


@torch.no_grad()
def test_a_layer_copied_inside_the_model_computes_the_scheme_and_is_unpatched_with_it() -> None:
    stock, model, ids = patched("llama_gqa", None), patched("llama_gqa", "alibi"), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for one in (stock, model):
        one.model.layers[1] = copy.deepcopy(one.model.layers[0])
    again = patched("llama_gqa", None)
    again.model.layers[1] = copy.deepcopy(again.model.layers[0])
    patch_model(again, "alibi")
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    assert torch.equal(model(**inputs).logits, again(**inputs).logits)
    unpatch_model(model)
    assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


# The same scheme again


@torch.no_grad()
def test_a_copied_layer_keeps_the_parameters_of_its_original_when_the_scheme_is_placed_again() -> None:
    model, ids = patched("llama_gqa", "forget_gate"), tokens(1, 8)
    for parameter in model.model.position_encoding.parameters():
        parameter.normal_()
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    expected = model(ids, use_cache=False).logits
    patch_model(model, "forget_gate")
    assert torch.equal(model(ids, use_cache=False).logits, expected)


_CHANGES: dict[str, Callable[[Any], None]] = {
    "the first layer is dropped": lambda layers: layers.pop(0),
    "the last layer is dropped": lambda layers: layers.pop(-1),
    "a layer is repeated": lambda layers: layers.append(layers[0]),
    "a layer is copied": lambda layers: layers.append(copy.deepcopy(layers[0])),
    "layers are exchanged": lambda layers: layers.insert(0, layers.pop(-1)),
}


@pytest.mark.parametrize("read", [inspect_model, native_scheme])
@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "t5"])
@pytest.mark.parametrize("change", _CHANGES)
@torch.no_grad()
def test_reading_a_model_whose_layers_changed_leaves_it_as_it_is(change: str, scheme: str, read: Any) -> None:
    def outcome() -> Any:
        try:
            return model(ids, use_cache=False).logits
        except UnsupportedError as error:
            return str(error)

    model, ids = patched("llama_gqa", scheme), tokens(1, 8)
    _CHANGES[change](model.model.layers)
    before = outcome()
    once = change == "a layer is repeated" and scheme == "t5"  # The layers are the same ones.
    if read is inspect_model:
        assert bool(inspect_model(model).disagreement) != once
    elif not once:
        with pytest.raises(UnsupportedError, match="is not as it was patched"):
            read(model)
    after = outcome()
    assert torch.equal(after, before) if isinstance(before, Tensor) else after == before
    if change != "a layer is repeated":  # Positions cannot be added at the first use of a layer only.
        patch_model(model, scheme)
        assert not inspect_model(model).disagreement


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
@torch.no_grad()
def test_a_copy_of_the_first_layer_adds_no_positions(scheme: str) -> None:
    ids, logits = tokens(1, 8), []
    for source in (0, 1):
        model = patched("llama_gqa", scheme)
        layers = model.model.layers
        layers.append(copy.deepcopy(layers[source]))
        layers[-1].load_state_dict(layers[1].state_dict())
        logits.append(model(ids, use_cache=False).logits)
        unpatch_model(model)
        assert not any(layer._forward_pre_hooks for layer in layers)
    assert torch.equal(*logits)


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
@torch.no_grad()
def test_positions_that_went_with_the_first_layer_are_missed(scheme: str, tmp_path: Path) -> None:
    model = patched("llama_gqa", scheme)
    model.model.layers.pop(0)
    for action in (lambda: model(tokens(1, 8), use_cache=False), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(UnsupportedError, match="no longer the first layer"):
            action()


class _Own(nn.Module):
    """An attention, or a layer, of a user's own."""

    def __init__(self, width: int, *, alone: bool) -> None:
        super().__init__()
        self.inner, self.alone = nn.Linear(width, width), alone

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        found = self.inner(hidden_states)
        return found if self.alone else (found, None)


class _Dropped(nn.Module):
    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


_PLACES = {"llama_gqa": ("layers", "self_attn"), "gpt2": ("h", "attn"), "bert": ("encoder.layer", "attention")}


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("which", [slice(1, 2), slice(None)], ids=["one", "all"])
@pytest.mark.parametrize("architecture", _PLACES)
@pytest.mark.parametrize("scheme", ["alibi", "learned", "none", "native"])
@torch.no_grad()
def test_a_module_of_another_class_in_place_of_an_attention_is_refused(
    scheme: str, architecture: str, which: slice, called: bool, tmp_path: Path
) -> None:
    layers, attention = _PLACES[architecture]
    for alone in (False, True):
        model, ids = patched(architecture, scheme), tokens(1, 8)
        if called:
            model(ids)
        width = model.config.hidden_size
        found = model.base_model.get_submodule(layers)
        for number in range(len(found))[which]:
            if alone:
                found[number] = _Own(width, alone=True)
            else:
                setattr(found[number], attention, _Own(width, alone=False))
        for action in (model, model, model.save_pretrained):
            with pytest.raises(PositionEncodingError, match="took the place of an attention"):
                action(tmp_path if action == model.save_pretrained else ids)


@torch.no_grad()
def test_an_attention_whose_weights_are_no_parameters_is_refused_too() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    own = _Own(model.config.hidden_size, alone=False)
    model.model.layers[1].self_attn = own
    weight = own.inner.weight
    del own.inner.weight
    own.inner.register_buffer("weight", weight.detach())
    own.inner.register_parameter("bias", None)
    with pytest.raises(UnsupportedError, match="took the place of an attention"):
        model(ids)


class _OfSome(nn.Module):
    """A layer that sees some of the tokens, as in a mixture of depths."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        phases = tuple(phase[:, ::2] for phase in kwargs["position_embeddings"])
        some = self.inner(hidden_states[:, ::2], position_embeddings=phases, attention_mask=None)
        return hidden_states.index_copy(1, torch.arange(0, hidden_states.shape[1], 2), some)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("scheme", ["native", "alibi", "forget_gate", "learned", "none"])
@torch.no_grad()
def test_tokens_that_a_layer_does_not_see_leave_the_positions_of_the_others_unknown(scheme: str, layer: int) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(1, 8)
    model.model.layers[layer] = _OfSome(model.model.layers[layer])
    if scheme == "none" or (scheme, layer) == ("learned", 1):
        model(ids, use_cache=False)
        return
    with pytest.raises(UnsupportedError, match="given 4 of the 8 tokens"):
        model(ids, use_cache=False)


@pytest.mark.parametrize("architecture", _PLACES)
@torch.no_grad()
def test_a_module_without_weights_drops_a_layer(architecture: str) -> None:
    model, ids = patched(architecture, "alibi"), tokens(1, 8)
    expected, layers = copy.deepcopy(model), _PLACES[architecture][0]
    del expected.base_model.get_submodule(layers)[1]
    model.base_model.get_submodule(layers)[1] = _Dropped()
    options = {} if architecture == "bert" else {"use_cache": False}
    assert torch.equal(model(ids, **options).logits, expected(ids, **options).logits)
