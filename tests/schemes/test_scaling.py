"""RoPE scalings against their authors' code, reductions, lengths and caches; `test_stock` has those of transformers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    ClippedScaling,
    DynamicScaling,
    DynamicYarnScaling,
    LongRopeScaling,
    RopeConfig,
)
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

from .building import counted, part_of


def assert_same(ours: tuple[torch.Tensor, float], theirs: tuple[torch.Tensor, float], rtol: float = 1e-7) -> None:
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], theirs[0], rtol=rtol, atol=0)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-12)


def test_longrope_takes_its_factor_from_the_length_of_the_model():
    long = LongRopeScaling((1.0,) * 8, (2.0,) * 8, 32, factor=4.0)
    inferred = dataclasses.replace(long, factor=None)
    assert_same(inferred.spectrum(1e4, 16, 40, 128), long.spectrum(1e4, 16, 40, 128), rtol=0)


# yarn a18e549, `LlamaDynamicYaRNScaledRotaryEmbedding(16, original_max_position_embeddings=64, beta_fast=4)`:
# `inv_freq` and `mscale`, of a new module and after a call with a longer sequence. The last two with
# `finetuned=True, max_position_embeddings=256`.
DYNAMIC_YARN = [
    (1.0, 64, [1.0, 0.316227764, 0.1, 0.0316227786, 0.01, 0.00316227786, 0.001, 0.000316227786], 1.0),
    (
        1.0, 200, [1.0, 0.244549453, 0.0546666682, 0.0101192892, 0.0032, 0.00101192889, 0.00032, 0.000101192891],
        1.1139434283188365,
    ),
    (
        4.0, 256, [1.0, 0.237170815, 0.05, 0.00790569466, 0.0025, 0.000790569466, 0.00025, 7.90569466e-05],
        1.138629436111989,
    ),
    (
        4.0, 392, [1.0, 0.228028178, 0.0442176834, 0.00516290264, 0.00163265306, 0.000516290253, 0.0001632653,
        5.16290202e-05], 1.181237875643079,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("factor", "length", "frequencies", "attention"), DYNAMIC_YARN)
def test_dynamic_yarn_equals_the_authors_code(factor, length, frequencies, attention):
    scaling = DynamicYarnScaling(64, factor, beta_fast=4.0)
    found, factor_found = scaling.spectrum(1e4, 16, length)
    torch.testing.assert_close(found, torch.tensor(frequencies), rtol=2e-7, atol=0)
    assert factor_found == pytest.approx(attention, rel=1e-7)


@given(
    theta=st.sampled_from([100.0, 10000.0, 500_000.0, 1e6]),
    width=st.sampled_from([4, 8, 16, 64, 128]),
    original=st.sampled_from([16, 64, 2048, 8192, 131072]),
    share=st.floats(0.1, 1.0),
)
@settings(max_examples=80, deadline=None)
def test_dynamic_yarn_changes_no_bit_up_to_the_original_length(theta, width, original, share):
    found = DynamicYarnScaling(original).spectrum(theta, width, max(int(original * share), 1))
    assert torch.equal(found[0], rope_inverse_frequencies(theta, width))
    assert found[1] == 1.0


def test_each_row_has_the_temperature_of_its_own_length():
    part = part_of(RopeConfig(scaling=DynamicYarnScaling(32)))
    factors = part.attention_factor(torch.tensor([[32], [320]]))
    torch.testing.assert_close(factors.flatten(), torch.tensor([1.0, 0.1 * math.log(10) + 1]))
    fixed = part_of(RopeConfig(scaling=DynamicYarnScaling(32), attention_scaling=1.25))
    cosine, sine = fixed.phases(counted(320))
    torch.testing.assert_close(cosine.square() + sine.square(), torch.full_like(cosine, 1.25**2))


# CoPE bb728e8, `modeling_cope.LlamaRotaryEmbedding` with `use_cope`, of 24 pairs and a base of 500000: `inv_freq`.
CLIPPED = [
    1.0, 0.578819156, 0.335031629, 0.193922758, 0.112246193, 0.0645272061, 0.0365872309, 0.0204553418, 0.011270877,
    0.00611592643, 0.00326493848, 0.0017123624, 0.000880691223, 0.000443085504, 0.000217339868, 0.000103462102,
    4.74874469e-05, 2.08136153e-05, 8.58155545e-06, 3.24547545e-06, 1.07376718e-06, 2.79403565e-07, 4.07086063e-08, 0.0,
]  # fmt: skip


def test_clipped_equals_the_authors_code():
    assert_same(ClippedScaling(20).spectrum(5e5, 48), (torch.tensor(CLIPPED), 1.0))


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicScaling(3.0, 32),
        DynamicYarnScaling(32),
        DynamicYarnScaling(16, 2.0),
        ClippedScaling(4, scaling=DynamicYarnScaling(32)),
        LongRopeScaling((1.0,) * 8, tuple(1.5 + pair for pair in range(8)), 32, factor=2.0),
    ],
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
