"""Every value of every option that has a few, in a Llama and a BERT. The options are read from the configs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import types
import typing
import warnings
from typing import Any

import pytest
import torch

from hf_posenc import UnsupportedError, list_schemes, patch_model
from hf_posenc.errors import UnknownNameError
from hf_posenc.schemes import AlibiConfig, ClippedScaling, RopeConfig, SchemeConfig, SinusoidalConfig
from hf_posenc.schemes.config import SubConfig
from hf_posenc.schemes.registry import get_scheme, scheme_from_dict

from ..matrix.architectures import ARCHITECTURES
from ..matrix.running import distance, outputs, strengthen, tokens

FAMILIES = ("llama_gqa", "bert")
#: The family for an option that deals key heads to axes, which needs more of them.
OF_OPTION = {"by_head": "llama_of_four_key_heads"}
#: A value for an option that may be left open, by its type. Heads have 16 dimensions, so 8 pairs.
SAMPLES: dict[Any, Any] = {
    int: 16,
    float: 0.5,
    bool: True,
    tuple[int, ...]: (2, 3, 3),
    tuple[float, ...]: tuple(5.0**-step for step in range(8)),
    tuple[float, float]: (2.0, 8.0),
}


def choices(config: type[Any], option: str) -> list[str]:
    """What an option that takes a name accepts: its own error lists it."""
    with pytest.raises(UnknownNameError) as refused:
        config(**{option: "no such choice"})
    return refused.value.known


def values(config: type[Any], option: str, kind: Any) -> list[Any]:
    """The values to try for one option; none for one that is a number only."""
    if isinstance(kind, types.UnionType):
        (inner,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
        return [None, *(values(config, option, inner) or [SAMPLES[inner]])]
    if kind is bool:
        return [True, False]
    if kind is str:
        return choices(config, option)
    if isinstance(kind, type) and issubclass(kind, SchemeConfig):
        return [RopeConfig(), AlibiConfig(), SinusoidalConfig()]
    if isinstance(kind, type) and issubclass(kind, SubConfig):
        return [sub_config(found) for found in SubConfig._types.values() if issubclass(found, kind)]
    return []


def sub_config(kind: type[SubConfig]) -> SubConfig:
    if kind is ClippedScaling:  # takes one of two options
        return ClippedScaling(pairs=4)
    kinds = typing.get_type_hints(kind)
    required = [field for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    # More than 1, which no factor of a length may be below.
    return kind(**{field.name: 2.0 if kinds[field.name] is float else SAMPLES[kinds[field.name]] for field in required})


def variants(name: str, step: int) -> dict[SchemeConfig, list[tuple[str, Any]]]:
    """The configs that set at most two options of a scheme, each with what it sets.

    Args:
        step: one in so many of the pairs of options is taken.
    """
    config = get_scheme(name)
    kinds = typing.get_type_hints(config)
    options = [
        [(field.name, value) for value in values(config, field.name, kinds[field.name])]
        for field in dataclasses.fields(config)
    ]
    pairs = [pair for two in itertools.combinations(options, 2) for pair in itertools.product(*two)]
    chosen = [[()], [(one,) for option in options for one in option], pairs[::step]]
    found: dict[SchemeConfig, list[tuple[str, Any]]] = {}
    for settings in itertools.chain(*chosen):
        try:
            found.setdefault(config(**dict(settings)), list(settings))
        except ValueError as refusal:
            assert_sentence(refusal)
    return found


def families_for(config: SchemeConfig) -> tuple[str, ...]:
    others = tuple(family for option, family in OF_OPTION.items() if getattr(config, option, False))
    return others or FAMILIES


def assert_sentence(error: Exception) -> None:
    text = str(error)
    assert text.endswith("."), text
    assert len(text.split()) > 5, text


@functools.cache
def model_of(family: str) -> Any:
    if family not in ARCHITECTURES:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
        return ARCHITECTURES["llama_gqa"].build(num_hidden_layers=1, **heads)
    heads = {"num_attention_heads": 2} | ({"num_key_value_heads": 1} if family == "llama_gqa" else {})
    return ARCHITECTURES[family].build(num_hidden_layers=1, **heads)


@functools.cache
def without_positions(family: str) -> torch.Tensor:
    return run(family, "none", "eager")


@torch.no_grad()
def run(family: str, scheme: Any, implementation: str) -> torch.Tensor:
    model = model_of(family)
    if scheme is not None:
        torch.manual_seed(7)
        patch_model(model, scheme)
        strengthen(model)
    torch.manual_seed(7)  # of schemes that draw positions
    model.set_attn_implementation(implementation)
    return outputs(model, tokens(2, 14))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["", "every pair"])
@pytest.mark.parametrize("name", list_schemes())
def test_every_variant_acts_or_is_refused(name: str, step: int) -> None:
    placed: set[tuple[str, Any]] = set()
    found = variants(name, step)
    places = itertools.chain.from_iterable(itertools.product([config], families_for(config)) for config in found)
    for config, family in places:
        expected = without_positions(family)
        assert scheme_from_dict(json.loads(json.dumps(config.to_dict()))) == config
        with warnings.catch_warnings(record=True, action="always") as warned:
            try:
                eager = run(family, config, "eager")
            except (UnsupportedError, ValueError) as refusal:
                assert_sentence(refusal)
                continue
        placed.update(found[config])
        # Float32, and a single layer.
        assert distance(run(family, None, "sdpa"), eager) < 1e-4, config
        assert eager.isfinite().all(), config
        (parts,) = model_of(family).position_encoding.stacks.values()
        scales_only = parts.additive is None and not any(
            layer.query_key_map or layer.logit_bias for layer in parts.layers
        )
        said = " ".join(str(warning.message) for warning in warned)
        invisible = "have no effect" in said
        scaled = any(layer.logit_scale is not None for layer in parts.layers)
        assert ("only scales attention logits" in said) == (scales_only and scaled), config
        if name != "none" and not scales_only and not invisible:
            assert distance(eager, expected) > 1e-4, config
    refused = {setting for settings in found.values() for setting in settings} - placed
    # Nested schemes are tested as schemes of their own.
    refused = {(option, value) for option, value in refused if not isinstance(value, SchemeConfig)}
    assert not refused, f"neither a Llama nor a BERT takes {refused}"
