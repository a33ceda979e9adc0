"""Properties of single additive schemes: algebra, lengths, adoption of native tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import (
    BinaryConfig,
    IntegerConfig,
    LearnedConfig,
    NormalizedIntegerConfig,
    PositionShiftConfig,
    SchemeConfig,
    SinusoidalConfig,
)

from .building import at, counted, part_of
from .table import positions_of, seeds
from .table.row import HIDDEN


def rows(config: SchemeConfig, length: int, hidden: int = HIDDEN) -> torch.Tensor:
    result: torch.Tensor = part_of(config, hidden_size=hidden)(counted(length))[0]
    return result


@pytest.mark.parametrize("position", [5, 4096, 1_000_000])
def test_sinusoidal_vectors_are_right_far_from_the_start(position: int) -> None:
    """Angles of thousands of positions need more than float32."""
    vector = part_of(SinusoidalConfig())(at([position]))[0, 0]
    expected = seeds.sinusoidal(SinusoidalConfig(), None, HIDDEN, position, 0)
    torch.testing.assert_close(vector, torch.tensor(expected), rtol=0, atol=1e-6)


def test_sinusoidal_padding_is_zero_and_offset_shifts() -> None:
    padded = part_of(SinusoidalConfig(offset=3))(positions_of(4, 9))
    assert padded[0, :5].eq(0).all()
    torch.testing.assert_close(padded[1, :6], rows(SinusoidalConfig(), 9)[3:], rtol=0, atol=0)


@pytest.mark.parametrize(("max_positions", "bits"), [(None, 11), (1, 1), (2, 1), (64, 6), (65, 7), (131072, 17)])
def test_binary_takes_the_fewest_bits_for_the_model(max_positions: int | None, bits: int) -> None:
    assert part_of(BinaryConfig(), max_positions=max_positions).bits == bits


def test_fixed_directions_share_one_norm_and_random_ignores_the_global_seed() -> None:
    for direction in ("ones", "random", "one_hot"):
        assert rows(IntegerConfig(direction=direction), 2, 100)[1].norm().item() == pytest.approx(10.0)
    first, state = part_of(IntegerConfig(direction="random")), torch.get_rng_state()
    second = part_of(IntegerConfig(direction="random"), seed=123)
    assert torch.equal(first(counted(3)), second(counted(3)))
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())


def test_only_live_normalisation_refuses_a_cache() -> None:
    live, frozen = part_of(NormalizedIntegerConfig()), part_of(NormalizedIntegerConfig(length=16))
    with pytest.raises(UnsupportedError, match=r"use_cache=False.*length="):
        live.check_cache(8, 9)
    live.check_cache(0, 9)
    frozen.check_cache(8, 9)
    # A single token is divided by a length of 1, less 1.
    assert rows(NormalizedIntegerConfig(subtract_one=True), 1).eq(0).all()


@pytest.mark.parametrize("extension", ["error", "interpolate"])
def test_learned_padding_falls_on_the_rows_below_the_offset(extension: str) -> None:
    part = part_of(LearnedConfig(10, 2, extension))
    padded = part(positions_of(4, 6))
    assert torch.equal(padded[0, :2], part.weight[1].expand(2, -1))
    assert torch.equal(padded[0, 2:], part.weight[2:6])


@given(length=st.integers(1, 200), num_positions=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_interpolation_keeps_rows_within_the_table_and_both_ends_past_it(length: int, num_positions: int) -> None:
    part = part_of(LearnedConfig(num_positions, extension="interpolate"))
    vectors = part(counted(length))[0]
    if length <= num_positions:
        assert torch.equal(vectors, part.weight[:length])
    else:
        assert torch.equal(vectors[[0, -1]], part.weight[[0, -1]])


def test_interpolation_refuses_only_caches_past_the_table() -> None:
    part, plain = part_of(LearnedConfig(10, extension="interpolate")), part_of(LearnedConfig(10))
    assert part.length_dependent
    assert not plain.length_dependent
    for cached, total in ((8, 10), (0, 30)):
        part.check_cache(cached, total)
    plain.check_cache(8, 30)
    for cached in (8, 10, 29):
        with pytest.raises(UnsupportedError, match=r"use_cache=False.*num_positions=30"):
            part.check_cache(cached, 30)
    shifted = part_of(PositionShiftConfig(LearnedConfig(10, extension="interpolate"), offset=5))
    shifted.check_cache(4, 5)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        shifted.check_cache(4, 6)


def test_adopting_into_shorter_and_longer_tables() -> None:
    native = torch.randn(18, HIDDEN)
    shorter, longer = part_of(LearnedConfig(8, 2)), part_of(LearnedConfig(31, 2))
    stretched = part_of(LearnedConfig(31, 2, "interpolate"))
    fresh = longer.weight.detach().clone()
    assert all(part.adopt(native) for part in (shorter, longer, stretched))
    assert torch.equal(shorter.weight, native[:10])
    assert torch.equal(longer.weight[:18], native)
    assert torch.equal(longer.weight[18:], fresh[18:])
    assert torch.equal(stretched.weight[:2], native[:2])
    torch.testing.assert_close(stretched.weight[2::2], native[2:])  # 31 rows over 16: every other one is native
    torch.testing.assert_close(stretched.weight[3::2], (native[2:-1] + native[3:]) / 2)
    for unfitting in (torch.zeros(16, 23), torch.zeros(2, 24), torch.zeros(24)):
        assert not shorter.adopt(unfitting)
        assert torch.equal(shorter.weight, native[:10])
