"""Allowed changes to forwards and layers of a patched model: the scheme is computed and removed as usual."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_posenc import UnsupportedError, inspect_model, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.place.stack_record import StackRecord
from tests.kits.decoding import left_padding
from tests.matrix.running import drawn, patched, tokens
from tests.patching.test_changed_models import exchange_the_base, put_a_stock_layer, put_beside
from tests.thinning import in_turn

pytestmark = pytest.mark.usefixtures("without_gradients")


class Dropped(nn.Module):
    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def with_wraps(inner: Any, module: Any) -> Any:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return forward


def with_attribute(inner: Any, module: Any) -> Any:
    module.original_forward = inner

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.original_forward(*args, **kwargs)

    return forward.__get__(module)


def with_global(inner: Any, module: Any) -> Any:
    script = {"inner": inner, "__name__": "a_script"}
    exec("def forward(*args, **kwargs):\n    return inner(*args, **kwargs)", script)
    return script["forward"]


class Timed:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("wrapper", [with_wraps, with_attribute, with_global, lambda inner, _: Timed(inner)])
def test_a_wrapper_that_calls_the_placed_forward_is_accepted(wrapper: Any, tmp_path: Path) -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 8)
    expected = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.forward = wrapper(layer.self_attn.forward, layer.self_attn)
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path)
    assert_loads(tmp_path, expected, ids)


def assert_loads(folder: Path, expected: Tensor, ids: Tensor) -> None:
    """A loaded model has another attention backend, which rounds differently."""
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(loaded(ids, use_cache=False).logits, expected, rtol=0, atol=1e-4)


def test_a_module_around_a_base_is_no_exchange() -> None:
    """As FSDP puts one."""

    class Wrapper(Timed, nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            nn.Module.__init__(self)
            self.inner = inner

    model, ids = patched("llama_gqa", "alibi"), tokens(1, 4)
    expected = model(ids).logits
    model.model = Wrapper(model.model)
    assert torch.equal(model(ids).logits, expected)


@torch.enable_grad()
def test_a_layer_may_be_dropped_at_random_in_training_but_not_always() -> None:
    model, ids = patched("llama_gqa", "alibi").train(), tokens(1, 4)
    layer = model.model.layers[1]
    inner = layer.forward
    runs = itertools.cycle([False] * 60 + [True])
    layer.forward = functools.wraps(inner)(lambda hidden, **kwargs: inner(hidden, **kwargs) if next(runs) else hidden)
    for _ in range(130):
        model(ids)
    put_beside(layer)
    layer.forward = inner
    for _ in range(100):
        model(ids)
    with pytest.raises(UnsupportedError, match="did not run in this call"):
        model(ids)


def test_the_first_calls_of_a_model_may_be_on_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one would search the layers, and await them all, while the first one is between two of them."""
    model, ids, problem = patched("llama_gqa", "alibi"), tokens(1, 4), StackRecord.problem
    expected = copy.deepcopy(model)(ids).logits
    searches, between_layers, enters, finished = (threading.Event() for _ in range(4))
    results: list[Tensor] = []

    def slow_problem(record: StackRecord) -> str:
        if threading.current_thread() is other:
            searches.set()
            between_layers.wait(10)
        else:
            other.start()
            searches.wait(0.5)
        return problem(record)

    def before_layer(module: Any, *_: Any) -> None:
        is_first = module is model.model.layers[0]
        (enters if is_first else between_layers).set()
        (finished if is_first else enters).wait(10)

    monkeypatch.setattr(StackRecord, "problem", slow_problem)
    other = threading.Thread(target=lambda: results.append(model(ids).logits))
    model.model.layers[0].register_forward_pre_hook(
        lambda *args: before_layer(*args) if threading.current_thread() is other else None
    )
    model.model.layers[1].register_forward_pre_hook(before_layer)
    results.append(model(ids).logits)
    finished.set()
    other.join()
    torch.testing.assert_close(results, [expected, expected])


@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt2", "bert"])
def test_a_module_without_weights_drops_a_layer(architecture: str) -> None:
    model, ids = patched(architecture, "alibi"), tokens(1, 8)
    layers = {"llama_gqa": "layers", "gpt2": "h", "bert": "encoder.layer"}[architecture]
    expected = copy.deepcopy(model)
    del expected.base_model.get_submodule(layers)[1]
    model.base_model.get_submodule(layers)[1] = Dropped()
    options = {} if architecture == "bert" else {"use_cache": False}
    assert torch.equal(model(ids, **options).logits, expected(ids, **options).logits)


# Layers that carry the scheme, in another order


def moved(model: Any, order: list[int]) -> None:
    model.model.layers = nn.ModuleList([model.model.layers[index] for index in order])
    model.config.num_hidden_layers = len(order)


SCHEDULE = {"scheme": "schedule", "layers": [{"scheme": "none"}, {"scheme": "alibi"}]}


@pytest.mark.parametrize(
    ("scheme", "order"), in_turn(["alibi", "t5", "forget_gate", SCHEDULE], [[1, 0], [1], [0, 1, 0]]), ids=str
)
def test_a_model_with_moved_layers_is_loaded_as_it_is_or_not_saved(
    scheme: Any, order: list[int], tmp_path: Path
) -> None:
    model, ids = drawn(patched("llama_gqa", scheme)), tokens(1, 8)
    moved(model, order)
    expected = model(ids, use_cache=False).logits
    # transformers itself saves no layer twice.
    refusal = "Call patch_model again" if scheme in (SCHEDULE, "forget_gate") else "shared tensors"
    if refusal != "shared tensors" or order == [0, 1, 0]:
        with pytest.raises((UnsupportedError, RuntimeError), match=refusal):
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    assert_loads(tmp_path, expected, ids)


@pytest.mark.parametrize(
    ("scheme", "copied"),
    [(scheme, False) for scheme in ("alibi", "t5", "fire", "forget_gate", "cope", "learned", "rope", "none")]
    + [("forget_gate", True)],
)
def test_moved_layers_keep_their_own_parameters_when_the_scheme_is_placed_again(scheme: str, copied: bool) -> None:
    model, ids = drawn(patched("llama_gqa", scheme, num_hidden_layers=3)), tokens(1, 8)
    moved(model, [2, 0])
    if copied:
        model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    if scheme == "learned":
        table = [*model.position_encoding.parameters()]
        patch_model(model, scheme)
        assert all(map(torch.equal, table, model.position_encoding.parameters()))
        return
    expected = model(ids, use_cache=False).logits
    patch_model(model, scheme)
    assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_copied_layers_compute_the_scheme_and_are_unpatched_with_it() -> None:
    stock, model, again, ids = patched("llama_gqa", None), patched("llama_gqa", "alibi"), None, tokens(2, 8)
    again = patched("llama_gqa", None)
    for other in (stock, model, again):
        other.model.layers[1] = copy.deepcopy(other.model.layers[0])
    patch_model(again, "alibi")
    inputs = {"input_ids": ids, "attention_mask": left_padding(8, 3), "use_cache": False}
    assert torch.equal(model(**inputs).logits, again(**inputs).logits)
    unpatch_model(model)
    assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


ORDERS: dict[str, Callable[[Any], None]] = {
    "the first layer is dropped": lambda layers: layers.pop(0),
    "the last layer is dropped": lambda layers: layers.pop(-1),
    "a layer is repeated": lambda layers: layers.append(layers[0]),
    "a layer is copied": lambda layers: layers.append(copy.deepcopy(layers[0])),
    "layers are exchanged": lambda layers: layers.insert(0, layers.pop(-1)),
}


@pytest.mark.parametrize(
    ("change", "scheme", "read"), in_turn(ORDERS, ["sinusoidal", "learned", "t5"], [inspect_model, native_scheme])
)
def test_reading_a_model_whose_layers_changed_leaves_it_as_it_is(change: str, scheme: str, read: Any) -> None:
    def outcome() -> Any:
        try:
            return model(ids, use_cache=False).logits
        except UnsupportedError as error:
            return str(error)

    model, ids = patched("llama_gqa", scheme), tokens(1, 8)
    ORDERS[change](model.model.layers)
    before = outcome()
    same_layers = change == "a layer is repeated" and scheme == "t5"
    if read is inspect_model:
        assert bool(inspect_model(model).disagreement) != same_layers
    elif not same_layers:
        with pytest.raises(UnsupportedError, match="was changed after it was patched"):
            read(model)
    after = outcome()
    assert torch.equal(after, before) if isinstance(before, Tensor) else after == before
    if change != "a layer is repeated":  # Positions cannot be added at the first use of a layer only.
        patch_model(model, scheme)
        assert not inspect_model(model).disagreement


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
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


def test_a_base_that_comes_back_is_called_again() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, 4)
    expected, base = model(ids).logits, model.model
    exchange_the_base(model)
    model.base_before = base
    with pytest.raises(UnsupportedError, match="its LlamaModel was replaced"):
        model(ids)
    del model.base_before
    model.model = base
    twin = copy.deepcopy(model)
    assert torch.equal(model(ids).logits, expected)
    exchange_the_base(twin)
    with pytest.raises(UnsupportedError, match="its LlamaModel was replaced"):
        pickle.loads(pickle.dumps(twin))(ids)
    unpatch_model(model)
    exchange_the_base(model)
    model(ids)


@pytest.mark.parametrize("scheme", ["alibi", "t5", "none", "pope", "sinusoidal"])
def test_patching_again_gives_the_model_that_was_meant(scheme: str) -> None:
    stock, model, ids = patched("llama_gqa", None), patched("llama_gqa", scheme), tokens(1, 8)
    expected, weights = model(ids).logits, model.model.position_encoding.state_dict()
    put_a_stock_layer(model)
    patch_model(model, scheme)
    model.model.position_encoding.load_state_dict(weights)
    assert torch.equal(model(ids).logits, expected)
    unpatch_model(model)
    assert torch.equal(model(ids).logits, stock(ids).logits)
