"""RoPE scalings against `ROPE_INIT_FUNCTIONS` and the live rotary module, reductions, lengths and caches."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from hf_posenc.schemes.rotary.p_rope import p_rope_inverse_frequencies
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

from .building import part_of

widths = st.sampled_from([4, 8, 16, 64, 128])
thetas = st.sampled_from([100.0, 10000.0, 500_000.0, 1e6])
factors = st.floats(1.0, 64.0)
originals = st.sampled_from([16, 64, 2048, 8192, 131072])
grid = settings(max_examples=80, deadline=None)


def stock_config(parameters: dict[str, Any], width: int, max_positions: int) -> LlamaConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LlamaConfig(
            hidden_size=2 * width,
            num_attention_heads=2,
            head_dim=width,
            max_position_embeddings=max_positions,
            rope_parameters=parameters,
        )


def stock_spectrum(
    parameters: dict[str, Any], width: int, max_positions: int = 2048, length: Any = None
) -> tuple[torch.Tensor, float]:
    function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    return function(stock_config(parameters, width, max_positions), seq_len=length)


def parameters_of(scaling: RopeScaling, theta: float) -> dict[str, Any]:
    """The options under the names that they have in transformers."""
    renamed = {"original_max_positions": "original_max_position_embeddings"}
    names = [field.name for field in dataclasses.fields(scaling)]
    options = {renamed.get(name, name): getattr(scaling, name) for name in names}
    return {"rope_type": scaling.type, "rope_theta": theta} | options


def assert_same(ours: tuple[torch.Tensor, float], theirs: tuple[torch.Tensor, float], rtol: float = 1e-7) -> None:
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], theirs[0], rtol=rtol, atol=0)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-12)


#: Scalings whose spectrum is the same at all lengths.
CONSTANT: dict[str, st.SearchStrategy[RopeScaling]] = {
    "linear": st.builds(LinearScaling, factors),
    "yarn": st.builds(
        lambda factor, original, fast, slow, attention, mscales, truncate: YarnScaling(
            factor, original, fast, slow, attention, *mscales, truncate
        ),
        factors,
        originals,
        st.floats(1.5, 64.0),
        st.floats(0.25, 1.25),
        st.sampled_from([None, 1.3]),
        st.sampled_from([(None, None), (1.0, 1.0), (0.707, 1.0), (0.0, 1.0), (0.5, None)]),
        st.booleans(),
    ),
    "llama3": st.builds(
        lambda factor, low, gap, original: Llama3Scaling(factor, low, low + gap, original),
        factors,
        st.floats(0.5, 2.0),
        st.floats(0.1, 8.0),
        originals,
    ),
}


@pytest.mark.parametrize("name", CONSTANT)
@given(theta=thetas, width=widths, data=st.data())
@grid
def test_constant_scalings_equal_transformers(name, theta, width, data):
    scaling = data.draw(CONSTANT[name])
    theirs = stock_spectrum(parameters_of(scaling, theta), width)
    assert_same(scaling.spectrum(theta, width), theirs, rtol=0 if name == "linear" else 1e-7)


@given(theta=thetas, width=widths, factor=factors, original=originals, stretch=st.floats(0.1, 40.0))
@example(theta=100.0, width=4, factor=8.49386653150895, original=16, stretch=1.0)
@grid
def test_dynamic_equals_transformers(theta, width, factor, original, stretch):
    parameters = {"rope_type": "dynamic", "rope_theta": theta, "factor": factor}
    length = max(int(original * stretch), 1)
    ours = DynamicScaling(factor, original).spectrum(theta, width, length)
    if length <= original:
        # Here a rotary module keeps the spectrum of its construction, computed in float64.
        assert_same(ours, stock_spectrum(parameters, width, original))
        assert torch.equal(ours[0], rope_inverse_frequencies(theta, width))
    else:
        # Here it passes the length as a tensor, and so computes the base in float32.
        assert_same(ours, stock_spectrum(parameters, width, original, torch.tensor(length)), rtol=2e-7)
        assert_same(ours, stock_spectrum(parameters, width, original, length), rtol=2e-5)


@given(theta=thetas, width=widths, fraction=st.floats(0.0, 1.0))
@example(theta=1e6, width=128, fraction=0.75)
@grid
def test_p_rope_equals_proportional(theta, width, fraction):
    parameters = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": fraction}
    theirs = stock_spectrum(parameters, width)
    assert_same((p_rope_inverse_frequencies(theta, width, fraction), 1.0), theirs, rtol=0)


@given(theta=thetas, width=widths, factor=factors)
@grid
def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest_by_the_factor(theta, width, factor):
    plain = rope_inverse_frequencies(theta, width)
    scaled, attention = NtkScaling(factor).spectrum(theta, width)
    assert scaled[0] == plain[0] == 1.0
    assert scaled[-1].item() == pytest.approx(plain[-1].item() / factor, rel=1e-5)
    assert attention == 1.0


def test_longrope_takes_its_factor_from_the_length_of_the_model():
    long = LongRopeScaling((1.0,) * 8, (2.0,) * 8, 32, factor=4.0)
    inferred = dataclasses.replace(long, factor=None)
    assert_same(inferred.spectrum(1e4, 16, 40, 128), long.spectrum(1e4, 16, 40, 128), rtol=0)


@pytest.mark.parametrize(
    "scaling",
    [DynamicScaling(3.0, 32), LongRopeScaling((1.0,) * 8, tuple(1.5 + pair for pair in range(8)), 32, factor=2.0)],
)
def test_the_original_length_itself_is_the_last_that_a_cache_may_reach(scaling):
    part = part_of(RopeConfig(scaling=scaling))
    assert part.length_dependent
    part.check_cache(31, 32)
    for cached in (1, 31, 32):
        with pytest.raises(UnsupportedError, match="use_cache=False"):
            part.check_cache(cached, 33)
    # Behind it, the frequencies of "longrope" stay as they are, and those of "dynamic" change with every token.
    if scaling.type == "longrope":
        part.check_cache(33, 34)
    else:
        with pytest.raises(UnsupportedError, match="use_cache=False"):
            part.check_cache(33, 34)
