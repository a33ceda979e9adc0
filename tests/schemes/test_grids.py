"""Schemes on grids: slow references, tokens without a place, shifts, several grids in one call, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.schemes import (
    AlibiConfig,
    AttentionPairs,
    LearnedConfig,
    Positions,
    PositionScaleConfig,
    RopeNdConfig,
    SchemeConfig,
    SinusoidalConfig,
    SwinConfig,
    T5Config,
)
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.rotary.rope_nd import CoordinateRotaryMap

from .grid_cases import HEAD_DIM, HEADS, HIDDEN, context, heads_of, image, parts_of
from .references import seeds

SIZE = (3, 4)

#: Whose logits depend on displacements only, on two axes.
RELATIVE = [
    RopeNdConfig(),
    RopeNdConfig(assignment="alternating", columns_first=True, origin=1),
    RopeNdConfig(assignment="golden"),
    RopeNdConfig(assignment="golden", per_head=False, rotary_dim=12, layout="interleaved"),
    RopeNdConfig(assignment="mixed"),
    RopeNdConfig(layout="half_by_axis"),
    AlibiConfig(axes=2),
    AlibiConfig("symmetric", learnable=True, axes=2),
    T5Config(axes=2, num_buckets=8, max_distance=6),
    SwinConfig(SIZE),
    SwinConfig(SIZE, class_entries=True, shared=True),
]
OVER_FRAMES = [
    RopeNdConfig(grid=(3, 4)),
    RopeNdConfig(grid=(3, 4), assignment="golden"),
    RopeNdConfig(grid=(3, 4), layout="half_by_axis", rotary_dim=12),
    AlibiConfig(axes=3),
    T5Config(axes=3),
    T5Config(axes=3, max_distance=5000),
    SwinConfig((2, 3, 4)),
]
BIASES = [one for one in RELATIVE + OVER_FRAMES if not isinstance(one, RopeNdConfig)]
ROTATIONS = [one for one in RELATIVE + OVER_FRAMES if isinstance(one, RopeNdConfig)]
ADDED = [
    SinusoidalConfig(axes=2),
    SinusoidalConfig("tensor2tensor", "concatenated", axes=2, columns_first=True, scale=0.5, offset=1),
    SinusoidalConfig(axes=3),
    LearnedConfig(grid=SIZE, num_prefix_tokens=2),
    LearnedConfig(grid=(2, 3, 4), num_prefix_tokens=1),
]


def axes_of(config: SchemeConfig) -> int:
    part = next(iter(config.build(context())))
    return int(part.axes)


def size_of(config: SchemeConfig) -> tuple[int, ...]:
    return SIZE if axes_of(config) == 2 else (2, 3, 4)


def logits_of(config: SchemeConfig, positions: Positions) -> Tensor:
    return positional_logits(parts_of(config), *heads_of(positions.ids.shape[-1]), positions)[0]


def bias_at(config: SchemeConfig, part: Any, head: int, query: list[int], key: list[int]) -> float:
    """The bias of two places: arXiv:2311.00566 (alibi), arXiv:2012.14740 (t5), arXiv:2103.14030 (swin)."""
    match config:
        case AlibiConfig():
            return -seeds.alibi_slope(HEADS, head) * math.dist(query, key)
        case T5Config():
            return sum(
                part.weight[
                    axis, seeds.t5_bucket(there - here, config.num_buckets, config.max_distance, True), head
                ].item()
                for axis, (here, there) in enumerate(zip(query, key, strict=True))
            )
        case SwinConfig():
            row = 0
            for here, there, size in zip(query, key, config.grid, strict=True):
                row = row * (2 * size - 1) + here - there + size - 1
            return float(part.weight[row, head])
    raise NotImplementedError(config)


@pytest.mark.parametrize(
    "config", [one for one in RELATIVE + OVER_FRAMES if not isinstance(one, RopeNdConfig)], ids=str
)
def test_biases_equal_a_slow_reference(config):
    positions = image(*size_of(config), prefix=2)
    parts = parts_of(config)
    query, key = heads_of(positions.ids.shape[-1])
    groups = query.shape[1] // key.shape[1]
    dots = query[0] @ key[0].repeat_interleave(groups, 0).transpose(-1, -2) * HEAD_DIM**-0.5
    bias = positional_logits(parts, query, key, positions)[0] - dots
    places = positions.coordinates[:, 0].T.tolist()
    for head in range(HEADS):
        for i, here in enumerate(places):
            for j, there in enumerate(places):
                if min(i, j) >= 2:
                    expected = bias_at(config, parts.logit_bias, head, here, there)
                elif getattr(config, "class_entries", False):
                    expected = parts.logit_bias.weight[-3 + (2 if max(i, j) < 2 else int(i >= 2)), head].item()
                else:
                    expected = 0.0
                assert bias[head, i, j].item() == pytest.approx(expected, abs=2e-5), (head, i, j)


@pytest.mark.parametrize("config", ROTATIONS, ids=str)
def test_rotations_equal_a_slow_reference(config):
    """Pair by pair; tokens without a place keep their heads."""
    positions = image(*size_of(config), prefix=2)
    part: Any = parts_of(config).query_key_map
    query, key = heads_of(positions.ids.shape[-1])
    phases = part.phases(positions)
    frequencies = part.frequencies_on(torch.device("cpu"))
    frequencies = frequencies.unsqueeze(1) if frequencies.ndim == 2 else frequencies
    width = config.rotary_dim or HEAD_DIM
    for heads, turned in ((query, part.map_query(query, phases)), (key, part.map_key(key, phases))):
        assert torch.equal(turned[:, :, :2], heads[:, :, :2])
        for head in range(heads.shape[1]):
            own = (
                frequencies if frequencies.ndim == 2 else frequencies[:, head * frequencies.shape[1] // heads.shape[1]]
            )
            for token in range(2, heads.shape[2]):
                place = [one + config.origin for one in positions.coordinates[:, 0, token].tolist()]
                angles = [sum(p * f for p, f in zip(place, pair, strict=True)) for pair in own.T.tolist()]
                if config.layout == "half_by_axis":
                    block = width // len(place)
                    expected = []
                    for axis in range(len(place)):
                        dims = heads[0, head, token, axis * block : (axis + 1) * block].tolist()
                        expected += seeds.rotate(
                            dims, angles[axis * block // 2 : (axis + 1) * block // 2], "half", 1, 1.0
                        )
                    expected += heads[0, head, token, width:].tolist()
                else:
                    layout = "half" if config.layout == "auto" else config.layout
                    expected = seeds.rotate(heads[0, head, token].tolist(), angles, layout, 1, 1.0)
                torch.testing.assert_close(turned[0, head, token], torch.tensor(expected), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("config", ADDED, ids=str)
def test_added_vectors_equal_a_slow_reference(config):
    size = size_of(config)
    positions = image(*size, prefix=2)
    part: Any = parts_of(config).additive
    for token, (place, vector) in enumerate(
        zip(positions.coordinates[:, 0].T.tolist(), part(positions)[0].tolist(), strict=True)
    ):
        if isinstance(config, LearnedConfig):
            row = 0
            for one, count in zip(place, size, strict=True):
                row = row * count + one
            row = token if token < 2 else config.num_prefix_tokens + row
            own = token >= 2 or token < config.num_prefix_tokens
            expected = part.weight[row].tolist() if own else [0.0] * HIDDEN
        elif token < 2:
            expected = [0.0] * HIDDEN
        else:
            plain = dataclasses.replace(config, axes=1, columns_first=False)
            order = place[::-1] if config.columns_first else place
            expected = []
            for one in order:
                expected += seeds.sinusoidal(plain, None, HIDDEN // len(place), one, 0)
        assert vector == pytest.approx(expected, abs=2e-6), token


@settings(max_examples=15, deadline=None)
@given(config=st.sampled_from(RELATIVE), rows=st.integers(0, 60), columns=st.integers(0, 60))
def test_moving_an_image_changes_no_logit(config, rows, columns):
    """Among patches; a rotation also turns them relative to tokens without a place."""
    here, there = image(*SIZE, prefix=2), image(*SIZE, prefix=2, shift=(rows, columns))
    ours, moved = logits_of(config, here), logits_of(config, there)
    # Angles up to 120 radians in float32.
    torch.testing.assert_close(ours[:, 2:, 2:], moved[:, 2:, 2:], rtol=0, atol=5e-5)
    if not isinstance(config, RopeNdConfig):
        torch.testing.assert_close(ours, moved, rtol=0, atol=5e-5)


@pytest.mark.parametrize("config", [*RELATIVE, *ADDED[:2], ADDED[3]], ids=str)
def test_images_of_several_sizes_in_a_batch_are_encoded_as_alone(config):
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
    if parts.additive is not None:
        both = parts.additive(together)
        for row, one in enumerate((first, second)):
            torch.testing.assert_close(both[row], parts.additive(one)[0], rtol=0, atol=1e-6)
        return
    query, key = heads_of(13)
    both = positional_logits(parts, query.expand(2, -1, -1, -1), key.expand(2, -1, -1, -1), together)
    for row, one in enumerate((first, second)):
        torch.testing.assert_close(both[row], positional_logits(parts, query, key, one)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("config", [SwinConfig((4, 4)), LearnedConfig(grid=(4, 4))], ids=str)
def test_the_size_of_the_grid_may_come_from_shapes(config):
    """Then no tensor has to be read."""
    sized = image(5, 3, prefix=1)
    known = dataclasses.replace(sized, extents=None, grid=(5, 3))
    parts = parts_of(config)
    if parts.additive is not None:
        assert torch.equal(parts.additive(sized), parts.additive(known))
    else:
        assert torch.equal(logits_of(config, sized), logits_of(config, known))


@pytest.mark.parametrize("config", [one for one in RELATIVE if not isinstance(one, RopeNdConfig)], ids=str)
def test_some_queries_and_keys_have_the_bias_of_all(config):
    positions = image(*SIZE, prefix=1)
    query, key = heads_of(13)
    bias: Any = parts_of(config).logit_bias
    pairs = AttentionPairs(query, key, torch.arange(13), positions, 1.0)
    part = bias(pairs.of_queries(4, 7).of_first_keys(9))
    # Tables of another size of grid are resized; the grid of the first keys is still that of the image.
    assert torch.equal(part, bias(pairs)[..., 4:7, :9])


@pytest.mark.parametrize("config", RELATIVE + ADDED, ids=str)
def test_a_cast_changes_only_learned_numbers(config):
    positions = image(*size_of(config), prefix=1)
    length = positions.ids.shape[-1]
    parts, cast = parts_of(config), parts_of(config)
    for part in cast:
        part.bfloat16()
    if parts.additive is not None:
        ours, theirs = parts.additive(positions), cast.additive(positions).float()
    else:
        query, key = heads_of(length)
        ours = positional_logits(parts, query, key, positions)
        theirs = positional_logits(cast, query, key, positions)
    learned = any(True for part in parts for _ in part.parameters())
    torch.testing.assert_close(theirs, ours, rtol=2e-2 if learned else 0, atol=3e-2 if learned else 0)


@pytest.mark.parametrize(
    "config",
    [
        SwinConfig(SIZE, num_prefix_tokens=1),
        LearnedConfig(grid=SIZE, num_prefix_tokens=1),
        RopeNdConfig(grid=(4,), num_prefix_tokens=1),
    ],
    ids=str,
)
def test_without_coordinates_tokens_fill_the_grid_row_by_row(config):
    with_places = image(*SIZE, prefix=1)
    order = Positions(with_places.ids, with_places.lengths)
    parts = parts_of(config)
    if parts.additive is not None:
        assert torch.equal(parts.additive(order), parts.additive(with_places))
        assert torch.equal(parts.additive(order)[0], parts.additive.weight)
    else:
        torch.testing.assert_close(logits_of(config, order), logits_of(config, with_places), rtol=0, atol=1e-6)


def test_normalized_coordinates_of_text_fill_as_many_rows_as_they_need():
    config = RopeNdConfig(grid=(4,), coordinates="normalized")
    order = Positions(torch.arange(12).unsqueeze(0), torch.tensor([[12]]))
    torch.testing.assert_close(logits_of(config, order), logits_of(config, image(3, 4)), rtol=0, atol=1e-6)
    part: Any = parts_of(config).query_key_map
    part.check_cache(0, 12)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        part.check_cache(8, 9)


@pytest.mark.parametrize("config", [SinusoidalConfig(axes=2), AlibiConfig(axes=2), T5Config(axes=2)], ids=str)
def test_a_model_without_coordinates_is_told_so(config):
    order = Positions(torch.arange(12).unsqueeze(0), torch.tensor([[12]]))
    with pytest.raises(ValueError, match=f"'{config.name}' has 2 axes.*passed no coordinates.*axes=1"):
        _run(config, order)


def _run(config: SchemeConfig, positions: Positions) -> Tensor:
    parts = parts_of(config)
    if parts.additive is not None:
        result: Tensor = parts.additive(positions)
        return result
    return logits_of(config, positions)


@pytest.mark.parametrize("config", [*RELATIVE, *ADDED[:2], ADDED[3]], ids=str)
def test_another_number_of_axes_is_refused(config):
    with pytest.raises(ValueError, match=f"positions on 3 axes.*'{config.name}' was built for 2.*Give it 3 axes"):
        _run(config, image(2, 3, 4))


@pytest.mark.parametrize(
    "config", [SwinConfig((4, 4), interpolation="none"), LearnedConfig(grid=(4, 4), interpolation="none")], ids=str
)
def test_a_table_that_is_not_resized_refuses_larger_grids_only(config):
    assert _run(config, image(2, 3)).isfinite().all()
    with pytest.raises(
        ValueError, match=r"grid of 5 x 3, larger than the 4 x 4.*interpolation='bilinear'.*grid=\(5, 3\)"
    ):
        _run(config, image(5, 3))


def test_a_table_of_places_refuses_what_it_has_no_row_for():
    part: Any = parts_of(LearnedConfig(grid=SIZE)).additive
    with pytest.raises(
        SequenceLengthError, match="length 13 is longer than the 12 positions of the learned grid of 3 x 4"
    ):
        part(Positions(torch.arange(13).unsqueeze(0), torch.tensor([[13]])))
    with pytest.raises(ValueError, match=r"up to \(3, 3\), outside of the learned grid of 3 x 4.*grid=\(4, 4\)"):
        part(image(4, 4, sized=False))
    video: Any = parts_of(LearnedConfig(grid=(2, 3, 4))).additive
    with pytest.raises(ValueError, match=r"2 frames cannot be resized to 5 frames bicubically.*'bilinear'"):
        video(image(5, 3, 4))
    assert video(image(2, 6, 5)).isfinite().all()
    resized: Any = parts_of(LearnedConfig(grid=(2, 3, 4), interpolation="bilinear")).additive
    assert resized(image(5, 6, 2)).isfinite().all()
    nearest: Any = parts_of(LearnedConfig(grid=SIZE, interpolation="nearest")).additive
    assert torch.equal(nearest(image(6, 4))[0, ::8], nearest.weight[::4])


def test_tables_of_another_size_are_adopted_if_they_are_square():
    part: Any = parts_of(LearnedConfig(grid=(6, 5), num_prefix_tokens=1)).additive
    native = torch.randn(17, HIDDEN)
    assert part.adopt(native)
    assert torch.equal(part.weight[0], native[0])
    expected: Any = parts_of(LearnedConfig(grid=(4, 4), num_prefix_tokens=1)).additive
    assert expected.adopt(native)
    torch.testing.assert_close(part(image(6, 5, prefix=1)), expected(image(6, 5, prefix=1)), rtol=0, atol=1e-6)
    for other in (torch.randn(16, HIDDEN), torch.randn(17, HIDDEN + 1), torch.randn(1, HIDDEN)):
        before = part.weight.clone()
        assert not part.adopt(other)
        assert torch.equal(part.weight, before)
    swin: Any = parts_of(SwinConfig(SIZE)).logit_bias
    assert not swin.adopt(torch.randn(36, HEADS))
    assert swin.adopt(torch.randn(35, HEADS))


def test_gradients_reach_resized_tables():
    for config in (SwinConfig((4, 4), class_entries=True), LearnedConfig(grid=(4, 4), num_prefix_tokens=1)):
        parts = parts_of(config)
        value = parts.additive(image(5, 6, prefix=1)) if parts.additive is not None else None
        if value is None:
            value = positional_logits(parts, *heads_of(31), image(5, 6, prefix=1))
        value.square().sum().backward()
        (weight,) = next(iter(parts)).parameters()
        assert (weight.grad.abs().sum(-1) > 0).all()


def test_a_position_map_moves_places_and_drops_the_size_of_the_grid():
    config = PositionScaleConfig(RopeNdConfig(), factor=0.5)
    positions = image(*SIZE, prefix=1)
    twice = dataclasses.replace(positions, coordinates=positions.coordinates * 2)
    torch.testing.assert_close(logits_of(config, twice), logits_of(RopeNdConfig(), positions), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="size of the grid of these tokens is unknown"):
        logits_of(PositionScaleConfig(RopeNdConfig(coordinates="normalized"), factor=0.5), positions)


def test_axial_frequencies_are_one_tensor_for_all_heads():
    """Heads that differ have to be mapped where all of them are known."""
    assert not CoordinateRotaryMap(torch.ones(2, 4), "half", "rope_nd").whole_heads
    assert CoordinateRotaryMap(torch.ones(2, 3, 4), "half", "rope_nd").whole_heads
    assert not parts_of(RopeNdConfig(assignment="golden", per_head=False)).query_key_map.whole_heads
