"""Gradient checkpointing of schemes that learn: the second run of a layer does what its first run did."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_posenc import BuildContext, UnsupportedError, list_schemes, patch_model, unpatch_model
from hf_posenc.errors import PositionEncodingError
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.schemes import AlibiConfig, BlendedConfig, ComposedConfig, NoneConfig, RandomizedConfig, RopeConfig
from hf_posenc.schemes.bias.t5 import T5Bias
from hf_posenc.schemes.registry import get_scheme

from ..matrix import running
from ..matrix.running import tokens
from ..models import tiny
from ..thinning import in_turn, mostly_slow


def build(**settings: Any) -> Any:
    torch.manual_seed(0)
    return tiny("LlamaForCausalLM", **settings).train()


def gradients(
    model: Any, checkpointing: dict[str, Any] | None, meanwhile: Callable[[Any], Any] = lambda model: None
) -> dict[str, torch.Tensor]:
    """Of all parameters. Something else may happen to the model between its forward and the backward pass."""
    if checkpointing is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable(checkpointing)
    torch.manual_seed(1)
    ids = tokens(2, 10)
    loss = model(ids, labels=ids, use_cache=False).loss
    # Layers are recomputed at their own positions, and not at those of a later call.
    model(ids, position_ids=torch.arange(10)[None] + 3, use_cache=False)
    meanwhile(model)
    return running.gradients(model, loss)


#: Sums are taken in another order.
assert_equal = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def assert_recomputed_exactly(model: Any, **checkpointing: Any) -> None:
    expected = gradients(model, None)
    for reentrant in (False, True):
        assert_equal(gradients(model, {"use_reentrant": reentrant} | checkpointing), expected)


def learns(name: str) -> bool:
    """Its parts are built alone: a model for each scheme would take seconds."""
    place = BuildContext(32, 4, 8, max_positions=64, num_key_value_heads=2)
    return any(True for part in get_scheme(name)().build(place) for _ in part.parameters())


LEARNED = [get_scheme(name)() for name in list_schemes() if learns(name)] + [AlibiConfig(learnable=True)]


@pytest.mark.parametrize("scheme", LEARNED, ids=lambda scheme: scheme.name)
def test_a_learned_scheme_that_comes_or_goes_is_recomputed_exactly(scheme: Any) -> None:
    """At the ends of a blend one side has gone; what is left of it has no gradient and is shared by the layers."""
    arrangements = (
        BlendedConfig(old=scheme, new=NoneConfig(), strength=1.0),
        BlendedConfig(old=NoneConfig(), new=scheme, strength=0.0),
        ComposedConfig(parts=(scheme, RopeConfig())),
    )
    ran = 0
    for config in arrangements:
        model = build()
        try:
            patch_model(model, config)
        except (PositionEncodingError, ValueError):
            continue
        assert_recomputed_exactly(model)
        ran += 1
    assert ran or scheme.name in {"pope", "hope"}


@pytest.mark.parametrize("preserve", [True, False])
def test_random_positions_are_those_of_the_first_run(preserve: bool) -> None:
    dropout = 0.3 if preserve else 0.0
    model = patch_model(build(attention_dropout=dropout), RandomizedConfig(inner=RopeConfig(), max_position=64))
    assert_recomputed_exactly(model, preserve_rng_state=preserve)


EXCHANGES = [
    ("rope", "none"), ("rope", None), ("alibi", "t5"), ("alibi", None), ("none", "alibi"), (None, "none"), (None, "t5"),
]  # fmt: skip


@pytest.mark.parametrize(("exchange", "reentrant"), in_turn(EXCHANGES, [True, False]), ids=str)
def test_another_scheme_between_forward_and_backward_is_refused(exchange: tuple[Any, Any], reentrant: bool) -> None:
    before, after = exchange
    model = build() if before is None else patch_model(build(), before)
    change = unpatch_model if after is None else functools.partial(patch_model, scheme=after)
    with pytest.raises(UnsupportedError, match="recomputed"):
        gradients(model, {"use_reentrant": reentrant}, change)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_same_scheme_after_a_look_at_the_stock_model_is_recomputed(reentrant: bool) -> None:
    def look(model: Any) -> None:
        with Transaction(model).suspended():
            pass

    model = patch_model(build(), "rope")
    expected = gradients(model, None)
    assert_equal(gradients(model, {"use_reentrant": reentrant}, look), expected)


def test_forward_mode_runs_as_in_stock() -> None:
    """A scheme with clamped parameters."""
    model, ids = patch_model(build(attn_implementation="eager"), "kerple"), tokens(1, 8)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    steps = {name: torch.ones_like(value) for name, value in values.items()}

    def total(given: Any) -> torch.Tensor:
        return torch.func.functional_call(model, given, (ids,), {"use_cache": False}).logits.square().mean()

    _, found = torch.func.jvp(total, (values,), (steps,))
    expected = sum(float(gradient.sum()) for gradient in torch.func.grad(total)(values).values())
    assert abs(float(found) - expected) <= 1e-3 * abs(expected)


@pytest.mark.parametrize(
    ("scheme", "reentrant"),
    mostly_slow(itertools.product(LEARNED, [True, False]), lambda case: not case[1] or case[0].name == "t5"),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_some_layers_may_be_recomputed_and_others_not(scheme: Any, reentrant: bool) -> None:
    """Layers share what they learn together, but a layer that is recomputed has its own."""
    model = patch_model(build(num_hidden_layers=4), scheme)
    ids = tokens(2, 10)

    expected = gradients(model, None)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for chosen in ((0,), (1, 2), (3,)):
        for number, layer in enumerate(model.model.layers):
            layer.gradient_checkpointing = number in chosen
        assert_equal(running.gradients(model, model(ids, labels=ids, use_cache=False).loss), expected)


@pytest.mark.parametrize("scheme", ["rope", "learned_rope", "sinusoidal", "t5"])
def test_layers_that_are_wrapped_after_a_first_forward_are_recomputed(scheme: str) -> None:
    """As FSDP wraps them."""
    model = patch_model(build(), scheme)
    expected = gradients(model, None)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    assert_equal([*gradients(model, None).values()], [*expected.values()])


def test_layers_share_what_they_learn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = patch_model(build(num_hidden_layers=4), "t5"), []
    forward = T5Bias.forward
    monkeypatch.setattr(T5Bias, "forward", lambda self, *args: calls.append(self) or forward(self, *args))
    gradients(model, None)
    assert len(calls) == 2  # in two calls of the model
    gradients(model, {"use_reentrant": False})
    assert len(calls) == 2 + (2 + 1) * 4
