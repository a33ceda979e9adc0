"""Positions drawn at random: their order and distribution, what shares a draw, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    BinaryConfig,
    ComposedConfig,
    LearnedConfig,
    Positions,
    RopeConfig,
    SchemeConfig,
    SinusoidalConfig,
    scheme_from_dict,
)
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig, PositionShiftConfig
from hf_posenc.schemes.position_maps.clamped import PositionClampConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig, RandomizedMap

from .building import LENGTH, build, logits_of, random_heads
from .table import positions_of


def drawn(positions: Positions, seed: int = 0, max_position: int = 64, real: bool = False) -> Tensor:
    torch.manual_seed(seed)
    return RandomizedMap(max_position, real, always=False).train()(positions)


@pytest.mark.parametrize("real", [False, True])
def test_draws_are_uniform(real):
    """Order statistics: the k-th of n values below L is at k (L + 1) / (n + 1) - 1 on average, or k L / (n + 1)."""
    count, length, limit = 4000, 3, 11
    ids = torch.arange(length).expand(count, -1)
    samples = drawn(Positions(ids, torch.full((count, 1), length)), max_position=limit, real=real).double()
    rank = torch.arange(1, length + 1).double()
    mean = rank * limit / (length + 1) if real else rank * (limit + 1) / (length + 1) - 1
    # The deviation of one sample is below 2.6, so that of the mean is below 0.042; five of them.
    torch.testing.assert_close(samples.mean(0), mean, rtol=0, atol=0.21)


def test_packed_documents_start_at_the_first_drawn_position():
    ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    new = drawn(Positions(ids, torch.tensor([[4]])))
    assert torch.equal(new[:, :3], new[:, 4:])


def test_everything_in_one_forward_shares_a_draw_and_the_next_one_draws_anew():
    config = RandomizedConfig(ComposedConfig((SinusoidalConfig(), RopeConfig(), AlibiConfig())), max_position=64)
    first, second = build(config, training=True), build(config, training=True)
    positions = positions_of(LENGTH)
    vectors = first.additive(positions)
    new = Positions(RandomizedMap(64, real=False, always=True)(positions), positions.lengths)
    assert not torch.equal(new.ids, positions.ids)
    assert torch.equal(vectors, build(SinusoidalConfig()).additive(new))
    logits = positional_logits(first, *random_heads(LENGTH), positions)
    torch.testing.assert_close(logits, logits_of(ComposedConfig((RopeConfig(), AlibiConfig())), new), rtol=0, atol=1e-5)
    # Another layer's copy, and a layer that is recomputed for its gradient.
    assert torch.equal(positional_logits(second, *random_heads(LENGTH), positions), logits)
    assert torch.equal(positional_logits(first, *random_heads(LENGTH), positions), logits)
    torch.manual_seed(1)
    assert not torch.equal(positional_logits(first, *random_heads(LENGTH), positions_of(LENGTH)), logits)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("seed", range(5))
def test_a_draw_fits_the_positions_it_is_for_whatever_was_drawn_before(order, seed):
    """The second part counts from 8, so that its draw is of 14 positions and the first one's of 6."""
    plain, shifted = RandomizedMap(16, real=False, always=True), PositionShiftConfig(offset=8).position_map()
    torch.manual_seed(seed)
    positions = positions_of(6)
    asked = [positions, shifted.renumber(positions)]
    draws: dict[int, Tensor] = {index: plain(asked[index]) for index in order}
    for ids in draws.values():
        assert (ids.diff() > 0).all()
        assert ids.min() >= 0
        assert ids.max() < 16
    # No other order of the parts, and no other layer, finds anything else.
    again = {index: RandomizedMap(16, real=False, always=True)(asked[index]) for index in reversed(order)}
    assert all(torch.equal(draws[index], again[index]) for index in order)
    torch.manual_seed(seed)
    alone = positions_of(6)
    assert torch.equal(draws[1], plain(shifted.renumber(alone)))


def test_tables_with_fewer_rows_than_can_be_drawn_are_refused():
    for inner in (LearnedConfig(num_positions=63), ComposedConfig((LearnedConfig(num_positions=63), RopeConfig()))):
        with pytest.raises(ValueError, match=r"positions only.*Give LearnedConfig\.num_positions=64"):
            build(RandomizedConfig(inner, max_position=64))
    with pytest.raises(ValueError, match=r"32 positions only.*Give BinaryConfig\.bits=6"):
        build(RandomizedConfig(BinaryConfig(bits=5), max_position=33))
    build(RandomizedConfig(BinaryConfig(bits=5), max_position=32))
    build(RandomizedConfig(LearnedConfig(num_positions=10, extension="interpolate"), max_position=64))


TEN = LearnedConfig(num_positions=10)


@pytest.mark.parametrize(
    ("inner", "rows", "fewer"),
    [
        (PositionShiftConfig(TEN, offset=5), 69, ", or max_position=5 or less"),
        (PositionShiftConfig(TEN, offset=10), 74, ""),
        (PositionScaleConfig(TEN, factor=2), 127, ", or max_position=5 or less"),
        (PositionClampConfig(TEN, maximum=10), 11, ", or max_position=10 or less"),
        (PositionClampConfig(PositionScaleConfig(TEN, factor=3), maximum=10), 31, ", or max_position=4 or less"),
        (HierarchicalConfig(TEN, segment_length=11), 11, ", or max_position=10 or less"),
        (ComposedConfig((PositionShiftConfig(TEN), RopeConfig())), 65, ", or max_position=9 or less"),
    ],
    ids=lambda value: value.name if isinstance(value, SchemeConfig) else None,
)
def test_the_rows_of_a_table_under_maps_of_its_own_are_counted_too(inner, rows, fewer):
    """As many rows as the error asks for are enough, and so is the range that it names."""
    with pytest.raises(ValueError, match=rf"10 positions only.*up to {rows - 1}\. Give .*={rows} or more{fewer}\.$"):
        build(RandomizedConfig(inner, max_position=64))
    build(RandomizedConfig(_with_rows(inner, rows), max_position=64))
    if fewer:
        build(RandomizedConfig(inner, max_position=int(fewer.split("=")[1].split()[0])))


def _with_rows(config: SchemeConfig, rows: int) -> SchemeConfig:
    written = json.dumps(config.to_dict())
    return scheme_from_dict(json.loads(written.replace('"num_positions": 10', f'"num_positions": {rows}')))


def test_more_tokens_than_positions_are_refused_only_while_drawing():
    config = RandomizedConfig(max_position=8)
    logits_of(config, positions_of(9))
    with pytest.raises(SequenceLengthError, match=r"length 9 is longer than the 8 positions.*max_position=16"):
        drawn(positions_of(9), max_position=8)


def test_a_cache_is_refused_only_while_drawing():
    config = RandomizedConfig(ComposedConfig((SinusoidalConfig(), RopeConfig(), AlibiConfig())))
    for part in build(config):
        part.check_cache(5, 6)
    for part in build(config, training=True):
        with pytest.raises(UnsupportedError, match=r"in training mode.*use_cache=False"):
            part.check_cache(5, 6)
    for part in build(dataclasses.replace(config, evaluation="random")):
        with pytest.raises(UnsupportedError, match=r"evaluation='random'.*use_cache=False"):
            part.check_cache(5, 6)


def test_drawing_compiles_without_a_graph_break():
    torch.compiler.reset()
    config = RandomizedConfig(ComposedConfig((SinusoidalConfig(), RopeConfig())), max_position=64)
    parts = build(config, training=True)

    def run(ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        positions = Positions(ids, lengths)
        return parts.additive(positions), parts.query_key_map.phases(positions)[0]

    positions = positions_of(LENGTH)
    vectors, cosine = torch.compile(run, backend="eager", fullgraph=True)(positions.ids, positions.lengths)
    # Both components of frequency 1 have the cosine of the same drawn position.
    torch.testing.assert_close(vectors[..., 1], cosine[..., 0], rtol=0, atol=1e-4)
    assert not torch.equal(vectors, build(SinusoidalConfig()).additive(positions))
