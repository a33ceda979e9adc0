"""Forwards of other tools that wrap those of a patched model's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

from hf_posenc import UnsupportedError, inspect_model, native_scheme, patch_model, unpatch_model
from hf_posenc.recipes import swap_scheme
from tests.thinning import in_turn

from ..architectures.calling import Caller
from ..architectures.population import pair_named
from ..matrix.running import outputs, patched, tokens

FOREIGN = "has a forward that another library.*unpatch_model"


@torch.no_grad()
def run(model: Any) -> Tensor:
    return outputs(model, tokens(2, 8))


def wrap(module: nn.Module) -> None:
    """Wraps a forward, as a tool that logs or times a module does."""
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "scheme", "path"),
    [
        ("llama_gqa", "alibi", "model.layers.1.self_attn"),
        ("llama_gqa", "t5", "model.rotary_emb"),
        ("llama_gqa", "sinusoidal", "model"),
        ("gpt2", "sinusoidal", "transformer.wpe"),
        ("bloom", "rope", "transformer.h.0.self_attention"),
        ("bert", "alibi", "bert.embeddings.position_embeddings"),
    ],
)
def test_a_wrapper_goes_on_around_the_stock_forward(name: str, scheme: str, path: str) -> None:
    model, stock = patched(name, None), run(patched(name, None))
    patch_model(model, scheme)
    in_force = run(model)
    module = model.get_submodule(path)
    wrap(module)
    wrapper = module.forward
    assert torch.equal(run(model), in_force)
    unpatch_model(model)
    # More than once: an unused rotary module returns a placeholder from the second call on.
    assert all(torch.equal(run(model), stock) for _ in range(2))
    assert module.forward is wrapper
    assert [module for module in model.modules() if "forward" in module.__dict__] == [module]
    assert set(model.state_dict()) == set(patched(name, None).state_dict())


def test_a_tool_may_put_back_the_forward_it_found_after_the_scheme_is_gone() -> None:
    model = patch_model(patched("llama_gqa", None), "alibi")
    attention = model.model.layers[0].self_attn
    found = attention.forward
    wrap(attention)
    unpatch_model(model)
    attention.forward = found
    assert torch.equal(run(model), run(patched("llama_gqa", None)))
    patch_model(model, "alibi")
    assert torch.equal(run(model), run(patch_model(patched("llama_gqa", None), "alibi")))
    unpatch_model(model)
    assert "forward" not in attention.__dict__


CALLS: list[Callable[[Any], Any]] = [
    native_scheme,
    inspect_model,
    lambda model: patch_model(model, "none"),
    lambda model: patch_model(model, "native"),
    lambda model: swap_scheme(model, "alibi"),
    lambda model: swap_scheme(model, "t5", sample=tokens(1, 16)),
    lambda model: swap_scheme(model, "t5", initialization="default", gradual=True),
]


@pytest.mark.parametrize(("call", "path"), in_turn(CALLS, ["layers.1.self_attn", "rotary_emb"]))
def test_what_would_pass_over_a_wrapper_is_refused_before_anything_is_taken_out(
    path: str, call: Callable[[Any], Any]
) -> None:
    model = patched("llama_gqa", "sinusoidal")
    before, encoding, entry = run(model), model.position_encoding, dict(model.config.position_encoding)
    keys = set(model.state_dict())
    wrap(model.model.get_submodule(path))
    with pytest.raises(UnsupportedError, match=f"model.{path}.*{FOREIGN}"):
        call(model)
    assert all(torch.equal(run(model), before) for _ in range(2))
    assert model.position_encoding is encoding
    assert model.config.position_encoding == entry
    assert set(model.state_dict()) == keys
    assert torch.equal(run(unpatch_model(model)), run(patched("llama_gqa", None)))


def test_continuous_batching_sees_attention_outside_the_interface_behind_a_wrapper() -> None:
    model = patched("bloom", "sinusoidal")
    for layer in model.transformer.h:
        wrap(layer.self_attention)
    with pytest.raises(UnsupportedError, match="computes its scores itself"):
        model.generate_batch([[5, 6, 7]])


@pytest.mark.parametrize("hooked", [False, True])
def test_a_question_about_a_stock_model_leaves_no_recorder_behind(hooked: bool) -> None:
    """The forward may be inside a hook of accelerate."""
    model, stock = patched("llama_gqa", None), run(patched("llama_gqa", None))
    last = model.model.layers[-1].self_attn
    wrap(last)
    if hooked:
        add_hook_to_module(last, ModelHook())
    for call in (native_scheme, native_scheme, lambda model: patch_model(model, "alibi")):
        with pytest.raises(UnsupportedError, match="has a forward that another library"):
            call(model)
        assert [module for module in model.modules() if "forward" in module.__dict__] == [last]
    if hooked:
        remove_hook_from_module(last)
    del last.forward
    assert torch.equal(run(patch_model(model, native_scheme(model))), stock)


def test_a_module_of_another_patched_model_is_refused() -> None:
    first, second = patched("llama_gqa", None), patched("llama_gqa", None)
    second.model.layers[1].self_attn = first.model.layers[1].self_attn
    patch_model(first, "alibi")
    with pytest.raises(UnsupportedError, match="shared with another model"):
        patch_model(second, "t5")
    assert "forward" not in second.model.layers[0].self_attn.__dict__
    unpatch_model(first)
    patch_model(second, "t5")


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_a_model_that_was_dispatched_after_the_patch(name: str) -> None:
    """accelerate replaces every module's forward, and keeps the one it found inside its hook."""
    model, stock = patched(name, "sinusoidal"), run(patched(name, None))
    expected = run(model)
    places = {path: "cpu" for path, module in model.named_modules() if not list(module.children())}
    dispatch_model(model, places | {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert sum("_old_forward" in module.__dict__ for module in model.modules()) > 5
    assert torch.equal(run(model), expected)
    native_scheme(model)
    assert torch.equal(run(model), expected)
    patch_model(model, "none")
    assert torch.equal(run(model), run(patched(name, "none")))
    assert torch.equal(run(unpatch_model(model)), stock)


@pytest.mark.parametrize("name", ["vision-swin", "masked-roformer"])
@torch.no_grad()
def test_a_native_mechanism_comes_back_in_a_model_that_was_dispatched_after_the_patch(name: str) -> None:
    """A scheme replaces the forward of Swin's tables of displacements, and that of RoFormer's table of phases."""
    caller = Caller(pair_named(name))
    stock = caller.outputs()
    patch_model(caller.model, "alibi")
    expected = caller.outputs()
    dispatch_model(caller.model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert torch.equal(caller.outputs(), expected)
    unpatch_model(caller.model)
    assert torch.equal(caller.outputs(), stock)
