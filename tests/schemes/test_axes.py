"""Schemes over several axes: slow references, tokens without a place, shifts, several grids in one call, refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    LearnedConfig,
    LogCpbConfig,
    MRopeConfig,
    Positions,
    PositionScaleConfig,
    RandomizedConfig,
    RopeNdConfig,
    SchemeConfig,
    SinusoidalConfig,
    SwinConfig,
    T5Config,
)
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.rotary.mrope import default_sections
from hf_posenc.schemes.rotary.rope_nd import axial_frequencies

from .building import build, counted, image, logits_of, part_of, placed_at, random_heads, redraw
from .table import distance_biases, seeds
from .table.row import HEAD_DIM, HEADS, HIDDEN, KEY_VALUE_HEADS

SIZE = (3, 4)

BIASES = [
    AlibiConfig(axes=2),
    AlibiConfig("symmetric", learnable=True, axes=2),
    T5Config(axes=2, num_buckets=8, max_distance=6),
    LogCpbConfig(axes=2, width=16),
    LogCpbConfig(5, width=16, limit=4.0, axes=2),
    SwinConfig(SIZE),
    SwinConfig(SIZE, class_entries=True, shared=True),
]
ROTATIONS = [
    RopeNdConfig(),
    RopeNdConfig(10_000.0, (4,), "split", layout="interleaved"),
    RopeNdConfig(assignment="alternating", columns_first=True, origin=1),
    RopeNdConfig(assignment="golden"),
    RopeNdConfig(assignment="golden", per_head=False, rotary_dim=12, layout="interleaved"),
    RopeNdConfig(assignment="mixed"),
    RopeNdConfig(layout="half_by_axis"),
]
OVER_FRAMES = [
    RopeNdConfig(50.0, (3, 4), "interleaved"),
    RopeNdConfig(grid=(3, 4), rotary_dim=14),
    RopeNdConfig(grid=(3, 4), assignment="golden"),
    RopeNdConfig(grid=(3, 4), assignment="mixed", per_head=False),
    RopeNdConfig(grid=(3, 4), layout="half_by_axis", rotary_dim=12),
    AlibiConfig(axes=3),
    T5Config(axes=3),
    T5Config(axes=3, max_distance=5000),
    LogCpbConfig(axes=3, width=16),
    SwinConfig((2, 3, 4)),
]
#: Whose logits depend on displacements only, on two axes, and on any number.
RELATIVE = BIASES + ROTATIONS
ALL_RELATIVE = RELATIVE + OVER_FRAMES
ADDED = [
    SinusoidalConfig(axes=2),
    SinusoidalConfig("tensor2tensor", "concatenated", axes=2, columns_first=True, scale=0.5, offset=1),
    SinusoidalConfig(axes=3),
    LearnedConfig(grid=SIZE, num_prefix_tokens=2),
    LearnedConfig(grid=(2, 3, 4), num_prefix_tokens=1),
]


def parts_of(config: SchemeConfig) -> Any:
    """The parts with weights that are large enough to be seen."""
    parts = build(config, causal=False, seed=3)
    for part in parts:
        if parts.query_key_map is None and any(parameter.ndim > 1 for parameter in part.parameters()):
            redraw(part, std=1.0)
    return parts


def size_of(config: SchemeConfig) -> tuple[int, ...]:
    axes = next(iter(parts_of(config))).axes if not isinstance(config, MRopeConfig) else 3
    return SIZE if axes == 2 else (2, 3, 4)


def run(config: SchemeConfig, positions: Positions, **cast: Any) -> Tensor:
    """What a scheme adds to embeddings, or makes of logits."""
    parts = parts_of(config)
    for part in parts:
        part.to(**cast)
    if parts.additive is not None:
        result: Tensor = parts.additive(positions)
        return result
    return logits_of(parts, positions)


def bias_at(config: SchemeConfig, part: Any, head: int, query: list[int], key: list[int]) -> float:
    """The bias of two places: arXiv:2311.00566 (alibi), arXiv:2012.14740 (t5), arXiv:2111.09883 (log_cpb)."""
    match config:
        case AlibiConfig():
            return -seeds.alibi_slope(HEADS, head) * math.dist(query, key)
        case T5Config():
            buckets = (
                seeds.t5_bucket(there - here, config.num_buckets, config.max_distance, True)
                for here, there in zip(query, key, strict=True)
            )
            return sum(part.weight[axis, bucket, head].item() for axis, bucket in enumerate(buckets))
        case LogCpbConfig():
            back = [here - there for here, there in zip(query, key, strict=True)]
            return distance_biases.log_cpb_of(config, part, head, back)
    raise NotImplementedError(config)


@pytest.mark.parametrize(
    "config", [config for config in ALL_RELATIVE if not isinstance(config, RopeNdConfig | SwinConfig)], ids=str
)
def test_biases_equal_a_slow_reference(config: Any) -> None:
    positions = image(*size_of(config), prefix=2)
    parts = parts_of(config)
    query, key = random_heads(positions.ids.shape[-1])
    dots = query[0] @ key[0].repeat_interleave(HEADS // KEY_VALUE_HEADS, 0).transpose(-1, -2) * HEAD_DIM**-0.5
    bias = (logits_of(parts, positions)[0] - dots).tolist()
    places = positions.coordinates[:, 0].T.tolist()
    for head in range(HEADS):
        for i, here in enumerate(places):
            for j, there in enumerate(places):
                if min(i, j) >= 2:
                    expected = bias_at(config, parts.logit_bias, head, here, there)
                else:
                    expected = getattr(config, "limit", 0.0) / 2
                assert bias[head][i][j] == pytest.approx(expected, abs=2e-5), (head, i, j)


@pytest.mark.parametrize("config", [config for config in ADDED if isinstance(config, SinusoidalConfig)], ids=str)
def test_added_vectors_equal_a_slow_reference(config: SinusoidalConfig) -> None:
    positions = image(*size_of(config), prefix=2)
    plain = dataclasses.replace(config, axes=1, columns_first=False)
    first, second, *vectors = run(config, positions)[0].tolist()
    assert first == second == [0.0] * HIDDEN
    for place, vector in zip(positions.coordinates[:, 0, 2:].T.tolist(), vectors, strict=True):
        expected = []
        for coordinate in place[::-1] if config.columns_first else place:
            expected += seeds.sinusoidal(plain, None, HIDDEN // len(place), coordinate, 0)
        assert vector == pytest.approx(expected, abs=2e-6), place


@pytest.mark.parametrize(
    "config",
    [one for one in ALL_RELATIVE + ADDED if isinstance(one, RopeNdConfig | SwinConfig | LearnedConfig)],
    ids=str,
)
def test_places_are_those_of_tokens_that_fill_the_grid(config: Any) -> None:
    """Which the table compares with slow references."""
    size = size_of(config)
    grid = {"grid": size[1:]} if isinstance(config, RopeNdConfig) else {}
    config = dataclasses.replace(config, num_prefix_tokens=2, **grid)
    positions = image(*size, prefix=2)
    torch.testing.assert_close(run(config, positions), run(config, counted(positions.ids.shape[-1])))
    if isinstance(config, LearnedConfig):
        # Another token without a place has no row.
        assert not run(dataclasses.replace(config, num_prefix_tokens=1), positions)[0, 1].any()


@pytest.mark.parametrize("config", [*RELATIVE, *ADDED[:2], ADDED[3]], ids=str)
def test_images_of_several_sizes_in_a_batch_are_encoded_as_alone(config: Any) -> None:
    if isinstance(config, SwinConfig | LearnedConfig):
        config = dataclasses.replace(config, interpolation="bilinear")
    first, second = image(3, 4, prefix=1), image(6, 2, prefix=1)
    together = Positions(
        first.ids.expand(2, -1),
        first.lengths.expand(2, 1),
        torch.cat((first.coordinates, second.coordinates), 1),
        extents=torch.cat((first.extents, second.extents), 1),
        placed=first.placed.expand(2, -1),
    )
    parts = parts_of(config)
    query, key = random_heads(13)
    for row, alone in enumerate((first, second)):
        if parts.additive is not None:
            both = parts.additive(together)
        else:
            both = positional_logits(parts, query.expand(2, -1, -1, -1), key.expand(2, -1, -1, -1), together)
        torch.testing.assert_close(both[row], run(config, alone)[0], rtol=0, atol=2e-6)


def test_normalized_coordinates_of_text_cannot_extend_a_cache() -> None:
    part = part_of(RopeNdConfig(grid=(4,), coordinates="normalized"))
    part.check_cache(0, 12)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        part.check_cache(8, 9)


@pytest.mark.parametrize(
    "config", [SinusoidalConfig(axes=2), AlibiConfig(axes=2), T5Config(axes=2), LogCpbConfig(axes=2)], ids=str
)
def test_a_model_without_coordinates_is_told_so(config: SchemeConfig) -> None:
    with pytest.raises(ValueError, match=f"'{config.name}' has 2 axes.*passed no coordinates.*axes=1"):
        run(config, counted(12))


@pytest.mark.parametrize("config", [*RELATIVE, *ADDED[:2], ADDED[3]], ids=str)
def test_another_number_of_axes_is_refused(config: SchemeConfig) -> None:
    with pytest.raises(ValueError, match=f"positions on 3 axes.*'{config.name}' was built for 2.*Give it 3 axes"):
        run(config, image(2, 3, 4))


@pytest.mark.parametrize("config", [SwinConfig((4, 4)), LearnedConfig(grid=(4, 4))], ids=str)
def test_a_table_that_is_not_resized_refuses_larger_grids_only(config: Any) -> None:
    config = dataclasses.replace(config, interpolation="none")
    assert run(config, image(2, 3)).isfinite().all()
    with pytest.raises(
        ValueError, match=r"grid of 5 x 3, larger than the 4 x 4.*interpolation='bilinear'.*grid=\(5, 3\)"
    ):
        run(config, image(5, 3))


def test_a_table_of_places_refuses_what_it_has_no_row_for() -> None:
    for config, positions, error, message in (
        (
            LearnedConfig(grid=SIZE),
            counted(13),
            SequenceLengthError,
            "length 13 is longer than the 12 positions of the learned grid of 3 x 4",
        ),
        (
            LearnedConfig(grid=SIZE),
            image(4, 4, sized=False),
            ValueError,
            r"up to \(3, 3\), outside of the learned grid of 3 x 4.*grid=\(4, 4\)",
        ),
        (
            LearnedConfig(grid=(2, 3, 4)),
            image(5, 3, 4),
            ValueError,
            r"2 frames cannot be resized to 5 frames bicubically.*'bilinear'",
        ),
    ):
        with pytest.raises(error, match=message):
            run(config, positions)
    assert run(LearnedConfig(grid=(2, 3, 4)), image(2, 6, 5)).isfinite().all()
    assert run(LearnedConfig(grid=(2, 3, 4), interpolation="bilinear"), image(5, 6, 2)).isfinite().all()
    nearest = part_of(LearnedConfig(grid=SIZE, interpolation="nearest"))
    assert torch.equal(nearest(image(6, 4))[0, ::8], nearest.weight[::4])


def test_tables_of_another_size_are_adopted_if_they_are_square() -> None:
    part = part_of(LearnedConfig(grid=(6, 5), num_prefix_tokens=1))
    native = torch.randn(17, HIDDEN)
    assert part.adopt(native)
    assert torch.equal(part.weight[0], native[0])
    expected = part_of(LearnedConfig(grid=(4, 4), num_prefix_tokens=1))
    assert expected.adopt(native)
    torch.testing.assert_close(part(image(6, 5, prefix=1)), expected(image(6, 5, prefix=1)), rtol=0, atol=1e-6)
    for other in (torch.randn(16, HIDDEN), torch.randn(17, HIDDEN + 1), torch.randn(1, HIDDEN)):
        before = part.weight.clone()
        assert not part.adopt(other)
        assert torch.equal(part.weight, before)
    swin = part_of(SwinConfig(SIZE), causal=False)
    assert not swin.adopt(torch.randn(36, HEADS))
    assert swin.adopt(torch.randn(35, HEADS))


def test_a_position_map_moves_places_and_drops_the_size_of_the_grid() -> None:
    positions = image(*SIZE, prefix=1)
    twice = dataclasses.replace(positions, coordinates=positions.coordinates * 2)
    half = run(PositionScaleConfig(RopeNdConfig(), factor=0.5), twice)
    torch.testing.assert_close(half, run(RopeNdConfig(), positions), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="size of the grid of these tokens is unknown"):
        run(PositionScaleConfig(RopeNdConfig(coordinates="normalized"), factor=0.5), positions)


def test_drawn_axes_share_a_draw_and_stay_in_range() -> None:
    """Text has equal axes and keeps them equal; an axis that reaches further than positions counts too."""
    part = part_of(RandomizedConfig(MRopeConfig(), max_position=40), training=True)
    coordinates = counted(20).ids.expand(3, 1, -1).clone()
    coordinates[2] += 20
    new = part.position_map.renumber(placed_at(coordinates))
    assert torch.equal(new.coordinates[0], new.ids)
    assert torch.equal(new.coordinates[1], new.ids)
    assert (new.coordinates[2] > new.ids).all()
    assert new.coordinates.min() >= 0
    assert new.coordinates.max() < 40


def test_mixed_frequencies_of_three_axes_start_as_axial_ones_turned() -> None:
    """A rotation of the axes keeps the length of every pair's direction."""
    frequencies = part_of(RopeNdConfig(grid=(3, 4), assignment="mixed")).frequencies.detach()
    axial = axial_frequencies(10.0, HEAD_DIM, 3, "block")
    # One rotation for all pairs of a head: angles between directions are those between axes.
    for head in frequencies.unbind(1):
        torch.testing.assert_close(head.T @ head, axial.T @ axial, rtol=0, atol=1e-5)
    assert (frequencies[:, 0] - frequencies[:, 1]).abs().max() > 1e-2


def test_default_sections_are_the_released_ones_in_proportion() -> None:
    assert default_sections(64, interleaved=False) == (16, 24, 24)
    assert default_sections(64, interleaved=True) == (24, 20, 20)
    assert default_sections(4, interleaved=False) == (1, 2, 1)
    assert default_sections(4, interleaved=True) == (2, 1, 1)
    for pairs in range(1, 130):
        for interleaved in (False, True):
            build(MRopeConfig(interleaved=interleaved), head_dim=2 * pairs)
