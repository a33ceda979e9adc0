"""Ctrl-C while the encoding of a model is exchanged: the model is the old one or the new one, and reports which."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import extend_context, native_scheme, patch_model, unpatch_model
from hf_posenc.recipes import swap_scheme
from tests.thinning import in_turn

from ..matrix.running import distance, outputs, patched, tokens


@torch.no_grad()
def run(model: Any) -> Tensor:
    return outputs(model, tokens(2, 8))


def calls_until_interrupt(operation: Callable[[], Any], last: int, event: str) -> int:
    """Runs an operation up to one call of a function of this package, or up to one return, and interrupts it there."""
    seen = 0

    def interrupt(frame: Any, found: str, _: Any) -> None:
        nonlocal seen
        code = frame.f_code
        if found == "return" and code.co_flags & inspect.CO_GENERATOR:
            return  # A `yield` looks like one, and no signal is delivered there.
        # An error in a generator that is being collected would be printed and dropped.
        if found == event and "hf_posenc/" in code.co_filename and code.co_name not in ("<genexpr>", "<listcomp>"):
            seen += 1
            if seen == last:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        operation()
    except KeyboardInterrupt:
        assert seen == last
    finally:
        sys.setprofile(None)
    return seen


STOCK = patched("llama_gqa", None)
OPERATIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "patch": (None, lambda model: patch_model(model, "sinusoidal")),
    "patch again": ("alibi", lambda model: patch_model(model, "t5")),
    "patch native": ("alibi", lambda model: patch_model(model, "native")),
    "unpatch": ("sinusoidal", unpatch_model),
    "question": ("alibi", native_scheme),
    "swap": ("alibi", lambda model: swap_scheme(model, "t5", sample=tokens(1, 16))),
    "gradual swap": ("alibi", lambda model: swap_scheme(model, "t5", initialization="default", gradual=True)),
    "extend": ("alibi", lambda model: extend_context(model, length=512)),
}


def scheme_of(model: Any) -> Any:
    return getattr(getattr(model, "position_encoding", None), "config", None)


def check(model: Any, before: Any, after: Any) -> None:
    """A model is one of two in every respect, and can still be unpatched and patched."""
    encoding, stated = getattr(model, "position_encoding", None), [scheme_of(before), scheme_of(after)]
    found = scheme_of(model)
    assert found in stated
    reference = copy.deepcopy(STOCK)
    if encoding is not None:
        patch_model(reference, found).position_encoding.load_state_dict(encoding.state_dict())
    assert distance(run(model), run(reference)) < 1e-5
    entry = model.config.__dict__.get("position_encoding")
    assert (entry is None) is (encoding is None)
    if entry is not None:
        assert entry["scheme"] == found.to_dict()
    lengths = {one.config.max_position_embeddings for one in (before, after)}
    assert model.config.max_position_embeddings in lengths
    assert encoding is None or encoding.lengths.current == model.config.max_position_embeddings
    unpatch_model(model)
    assert torch.equal(run(model), run(STOCK))
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())
    assert model.config.to_dict() == STOCK.config.to_dict()
    assert set(model.state_dict()) == set(STOCK.state_dict())
    patch_model(model, "alibi")
    assert distance(run(model), run(patch_model(copy.deepcopy(STOCK), "alibi"))) < 1e-5


@pytest.mark.parametrize("points", [4, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "event"), in_turn(OPERATIONS, ["call", "return"]))
def test_an_interrupted_exchange_leaves_the_old_model_or_the_new_one(name: str, event: str, points: int) -> None:
    scheme, operation = OPERATIONS[name]
    before, after = patched("llama_gqa", scheme), patched("llama_gqa", scheme)
    total = calls_until_interrupt(functools.partial(operation, after), 0, event)
    for last in random.Random(f"{name} {event}").sample(range(1, total + 1), min(points, total)):
        model = copy.deepcopy(before)
        calls_until_interrupt(functools.partial(operation, model), last, event)
        check(model, before, after)
