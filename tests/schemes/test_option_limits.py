"""Every option of every scheme, at and past its limits: refused by name, or cheap to build and finite."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from hf_posenc.schemes import (
    BlendedConfig,
    ComposedConfig,
    PositionShiftConfig,
    RopeConfig,
    ScheduleConfig,
    SchemeConfig,
    SubConfig,
    scheme_from_dict,
)
from hf_posenc.schemes.config import nesting
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.validation import (
    DEEPEST_NESTING,
    LARGEST_FACTOR,
    LARGEST_LENGTH,
    LARGEST_WIDTH,
    MOST_DISTANCES,
    MOST_LAYERS,
    MOST_PARTS,
    MOST_ROWS,
    SMALLEST_FACTOR,
    check_declared,
)

from .building import build, random_heads
from .table import HIDDEN, VARIANTS, context_for, positions_of

#: What fits no option, or whose refusal has to name the option.
WRONG: list[Any] = [
    math.nan, math.inf, -math.inf, 1e300, -1e300, 10**400, -(10**400), 2**64, -(2**63) - 1, True, "x", "\0", b"x",
    [], {}, [[]], [1, "x"], (math.nan,), [1.0] * 100_000, object(), "a" * 10_000,
]  # fmt: skip
#: Limits, and what lies just inside and outside of them.
EXTREME: list[Any] = [
    0, 1, 2, LARGEST_LENGTH, LARGEST_LENGTH + 1, MOST_ROWS, MOST_ROWS + 1, MOST_DISTANCES, MOST_DISTANCES + 1,
    LARGEST_WIDTH, LARGEST_WIDTH + 1, LARGEST_FACTOR, -LARGEST_FACTOR, SMALLEST_FACTOR, SMALLEST_FACTOR / 2,
    1e-18, 1e-300, 1e18, 1e30, 1e31, 3e38, 2**53 + 1, 2**60, 0.5, 1.0, -0.0,
]  # fmt: skip
#: Bytes that the parts of a scheme may take in the small model of the tests: the largest table, times two.
MOST_BYTES = 2 * 4 * MOST_ROWS * 2 * HIDDEN
#: Numbers in parameters up to which a part is built for real and run.
FEW = 2**21


def fields_of_all_configs() -> list[Any]:
    """Each field of each class of configs once, in the first variant of the table that has it."""
    cases: dict[tuple[type, str], Any] = {}
    for name, config, _ in VARIANTS:
        for owner in (config, *(value for value in vars(config).values() if isinstance(value, SubConfig))):
            for field in dataclasses.fields(owner):
                cases.setdefault((type(owner), field.name), (config, owner, field.name, name))
    return [pytest.param(*given[:3], id=f"{cls.__name__}.{field}") for (cls, field), given in cases.items()]


def changed(config: SchemeConfig, owner: Any, field: str, value: Any) -> SchemeConfig:
    """The config with another value in one of its own options, or in one of its scaling's."""
    new = dataclasses.replace(owner, **{field: value})
    return new if owner is config else dataclasses.replace(config, scaling=new)


def bytes_of(config: SchemeConfig) -> int:
    """What the parts of a scheme would take, without taking it."""
    with torch.device("meta"):
        parts = config.build(context_for(config))
    return sum(parameter.numel() * 4 for part in parts for parameter in part.parameters())


def run(config: SchemeConfig) -> list[torch.Tensor]:
    """What a scheme adds and makes of logits, for tokens with ordinary values at positions up to a few thousand."""
    causal = context_for(config).causal
    parts, positions = build(config, causal=causal), positions_of(12)
    positions = dataclasses.replace(positions, ids=positions.ids * 300, lengths=positions.lengths * 300)
    results = [] if parts.additive is None else [parts.additive(positions)]
    logits = positional_logits(parts, *random_heads(12), positions, torch.randn(1, 12, HIDDEN))
    if causal:
        logits = logits.masked_fill(torch.ones(12, 12).triu(1).bool(), 0.0)
    return [*results, logits]


@pytest.mark.parametrize(("config", "owner", "field"), fields_of_all_configs())
def test_no_value_of_an_option_costs_memory_or_makes_numbers_that_are_none(config, owner, field) -> None:
    of_type = owner.__dataclass_fields__[field]
    for value in [*WRONG, *EXTREME]:
        try:
            new = changed(config, owner, field, value)
        except ValueError as error:
            message = str(error)
            # A name that nobody knows is called by itself, and a list of schemes is a ComposedConfig.
            other = ("Unknown scheme", "ComposedConfig", "RopeScaling", "group of options", "Not a scheme")
            assert any(words in message for words in (field, type(owner).__name__, *other)), (value, message)
            assert len(message) < 2000, (value, len(message))
            continue
        # What is accepted has the declared type: no text, no boolean, no fraction for an integer, nothing infinite.
        check_declared(value, of_type, type(owner).__name__)
        assert not isinstance(value, str), "a text is one of a few names"
        try:
            size = bytes_of(new)
        except ValueError:
            continue  # Does not fit this model.
        assert size <= MOST_BYTES, (value, size)
        if size <= 4 * FEW:
            try:
                results = run(new)
            except (ValueError, IndexError):
                continue  # A table that is too short for these positions, and says so.
            assert all(result.isfinite().all() for result in results), value


@pytest.mark.parametrize("depth", [DEEPEST_NESTING - 1, DEEPEST_NESTING, 300, 400, 100_000])
def test_schemes_inside_each_other_have_a_limit(depth: int) -> None:
    entry: dict[str, Any] = {"scheme": "alibi"}
    for _ in range(depth):
        entry = {"scheme": "position_shift", "inner": entry}
    if depth < DEEPEST_NESTING:
        config = scheme_from_dict(entry)
        assert nesting(config) == DEEPEST_NESTING
        outer: list[tuple[Any, Any]] = [(PositionShiftConfig, config), (BlendedConfig, config)]
        for kind, inside in [*outer, (ComposedConfig, (config,)), (ScheduleConfig, (config,))]:
            with pytest.raises(ValueError, match="the limit is 16"):
                kind(inside)
        return
    with pytest.raises(ValueError, match=r"the limit is 16|which is the limit"):
        scheme_from_dict(entry)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"scheme": "composed", "parts": ["alibi"] * (MOST_PARTS + 1)}, "at most 64"),
        ({"scheme": "schedule", "layers": ["alibi"] * (MOST_LAYERS + 1)}, "at most 4096"),
        ({"scheme": "schedule", "layers": ["alibi"] * 1_000_000}, "more than 131072 values"),
        ({"scheme": "rope", "inverse_frequencies": [0.5] * 10_000_000}, "more than 131072 values"),
        ({"scheme": "composed", "parts": [["alibi"]]}, "another ComposedConfig"),
        ({"scheme": 5}, "a name under 'scheme'"),
        ({"theta": 1.0}, "a name under 'scheme' is expected"),
        ({"scheme": "x" * 100_000}, r"Unknown scheme 'x{97}\.\.\.'"),
    ],
)
def test_wide_configs_are_refused_before_anything_is_built(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        scheme_from_dict(entry)
    assert len(str(caught.value)) < 2000


def test_an_integer_that_no_float_holds_exactly_becomes_a_float() -> None:
    assert isinstance(RopeConfig(theta=2**64).theta, float)
    assert isinstance(RopeConfig(theta=10_000).theta, int)
