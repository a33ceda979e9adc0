"""A call that ends early, by an error or an interrupt, leaves nothing behind, wherever in the model it ends."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from hf_posenc import UnsupportedError, patch_model, unpatch_model
from hf_posenc.patching.call.runtime import PerThread
from hf_posenc.patching.forwards import forward_on_instance
from tests.models import tiny

from ..matrix.architectures import ARCHITECTURES
from ..matrix.running import outputs, patched, tokens


def calls_in_progress(model: nn.Module) -> int:
    """The number of calls in progress, according to the model's sites."""
    holders = [getattr(module, "runtime", None) for module in model.modules()]
    holders += map(forward_on_instance, model.modules())
    found = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    return sum(len(value.of_this_thread()) for value in found if isinstance(value, PerThread))


def interrupted(error: type[BaseException]) -> Any:
    def hook(*_: Any) -> None:
        raise error

    return hook


@pytest.mark.parametrize(
    ("name", "scheme", "error"),
    [
        ("llama_gqa", "alibi", KeyboardInterrupt),
        ("llama_gqa", "forget_gate", SystemExit),
        ("gpt2", "rope", GeneratorExit),
        ("bloom", "pope", KeyboardInterrupt),
        ("bert", "t5", ValueError),
        ("bart", "learned", SystemExit),
    ],
)
@torch.no_grad()
def test_a_call_may_end_at_every_module(name: str, scheme: str, error: type[BaseException]) -> None:
    model, ids = patched(name, scheme), tokens(2, 6)
    expected = outputs(model, ids)
    cached, left = ARCHITECTURES[name].causal, []
    for module in list(model.modules())[1:]:
        cache = DynamicCache(config=model.config) if cached else None
        with module.register_forward_pre_hook(interrupted(error)), contextlib.suppress(error):
            outputs(model, ids, **({} if cache is None else {"past_key_values": cache}))
        assert calls_in_progress(model) == 0
        if cache is not None:
            assert "update" not in vars(cache)
            left.append((type(module).__name__, weakref.ref(cache)))
            del cache
    gc.collect()
    assert not [module for module, cache in left if cache() is not None]
    assert torch.equal(outputs(model, ids), expected)


def inner_call(**given: Any) -> Callable[[Any], Any]:
    return lambda model: model.model(tokens(1, 3), **given)


def inner_call_behind_a_hook(model: Any) -> None:
    """It ends before the stack's forward begins, but torch still runs the hooks at its end."""
    with model.model.register_forward_pre_hook(interrupted(LookupError), prepend=True):
        model.model(tokens(1, 3))


@pytest.mark.parametrize(
    "inner",
    [
        # Refused while positions are resolved.
        inner_call(position_ids=torch.tensor([[[0, 1, 2]], [[0, 0, 1]], [[0, 1, 1]]])),
        # Fails later.
        inner_call(attention_mask=torch.ones(1, 1, 1, 1, 1)),
        inner_call_behind_a_hook,
    ],
)
@torch.no_grad()
def test_an_inner_call_that_fails_leaves_the_outer_one_its_positions(inner: Callable[[Any], Any]) -> None:
    model, ids = patched("llama_gqa", "log_n_scale"), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    expected = model(ids, attention_mask=mask).logits
    failures = []

    def call_again(*_: Any) -> None:
        hook.remove()
        try:
            inner(model)
        except (UnsupportedError, ValueError, LookupError, RuntimeError) as error:
            failures.append(error)

    hook = model.model.layers[0].register_forward_pre_hook(call_again)
    assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    assert len(failures) == 1


def test_data_parallel_copies_are_refused() -> None:
    model = patched("llama_gqa", "alibi")
    with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
        model.model._replicate_for_data_parallel()
    unpatch_model(model)
    assert "_replicate_for_data_parallel" not in model.model.__dict__


@torch.no_grad()
def test_a_stack_keeps_the_forward_that_somebody_has_set_on_it() -> None:
    """`Accelerator.prepare` sets one for mixed precision, on whatever model it is given."""
    torch.manual_seed(0)
    model, ids, calls = tiny("BertModel").eval(), tokens(2, 6), []
    own = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    model.forward = counted
    stock = model(ids).last_hidden_state
    patch_model(model, "alibi")
    calls.clear()
    assert not torch.equal(model(ids).last_hidden_state, stock)
    assert len(calls) == 1
    unpatch_model(model)
    assert model.forward is counted
    assert torch.equal(model(ids).last_hidden_state, stock)
