"""Gradient checkpointing of schemes that learn: the second run of a layer does what its first run did."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hf_posenc import list_schemes, patch_model
from hf_posenc.errors import PositionEncodingError
from hf_posenc.schemes import AlibiConfig, BlendedConfig, ComposedConfig, NoneConfig, RandomizedConfig, RopeConfig
from hf_posenc.schemes.registry import get_scheme

from ..matrix.running import tokens
from ..models import tiny


def build(**settings: Any) -> Any:
    torch.manual_seed(0)
    return tiny("LlamaForCausalLM", **settings).train()


def gradients(model: Any, checkpointing: dict[str, Any] | None) -> list[torch.Tensor | None]:
    if checkpointing is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable(checkpointing)
    model.zero_grad()
    torch.manual_seed(1)
    ids = tokens(2, 10)
    model(ids, labels=ids, use_cache=False).loss.backward()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def assert_recomputed_exactly(model: Any, **checkpointing: Any) -> None:
    expected = gradients(model, None)
    for reentrant in (False, True):
        found = gradients(model, {"use_reentrant": reentrant} | checkpointing)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)  # sums in another order


def learns(name: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return any(True for _ in patch_model(build(), name).position_encoding.parameters())


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
