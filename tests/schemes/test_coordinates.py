"""Rotations over several axes: what each axis may and may not change, grids, sections, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_posenc.schemes import RopeConfig, SchemeConfig
from hf_posenc.schemes.grids import grid_coordinates
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig
from hf_posenc.schemes.rotary.mrope import MRopeConfig, default_sections
from hf_posenc.schemes.rotary.rope_nd import RopeNdConfig, axial_frequencies

from .coordinate_cases import (
    HEAD_DIM,
    WIDTH,
    at,
    context,
    logits_of,
    map_of,
    mapped,
    plain,
    query_and_key,
    scattered,
)


def test_default_sections_are_the_released_ones_in_proportion():
    assert default_sections(64, interleaved=False) == (16, 24, 24)
    assert default_sections(64, interleaved=True) == (24, 20, 20)
    assert default_sections(4, interleaved=False) == (1, 2, 1)
    assert default_sections(4, interleaved=True) == (2, 1, 1)
    for pairs in range(1, 130):
        for interleaved in (False, True):
            MRopeConfig(interleaved=interleaved).build(context(2 * pairs))


@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope_of_text_is_exactly_rope(interleaved):
    query, key = query_and_key()
    rope = mapped(map_of(RopeConfig(theta=1e6)), plain(), query, key)
    part = map_of(MRopeConfig(interleaved=interleaved))
    diagonal = at(plain().ids.expand(3, 1, -1))
    for positions in (plain(), diagonal):
        for ours, theirs in zip(mapped(part, positions, query, key), rope, strict=True):
            assert torch.equal(ours, theirs)


FIXED = [
    RopeNdConfig(),
    RopeNdConfig(10_000.0, (4,), "split", layout="interleaved"),
    RopeNdConfig(50.0, (3, 4), "interleaved"),
    RopeNdConfig(grid=(3, 4), rotary_dim=14),
    MRopeConfig(),
    MRopeConfig(interleaved=True),
]
MIXED = [RopeNdConfig(assignment="mixed"), RopeNdConfig(grid=(3, 4), assignment="mixed", per_head=False)]


def axes_of(config: SchemeConfig) -> int:
    return len(config.grid) + 1 if isinstance(config, RopeNdConfig) else 3


@pytest.mark.parametrize("config", FIXED + MIXED, ids=str)
def test_a_logit_depends_on_coordinate_differences_only(config):
    query, key = query_and_key(key_heads=2)
    coordinates = scattered(axes_of(config))
    shift = torch.tensor([17, 5, 90])[: len(coordinates)].view(-1, 1, 1)
    moved = logits_of(config, at(coordinates + shift), query, key)
    # Angles up to 120 radians in float32.
    torch.testing.assert_close(moved, logits_of(config, at(coordinates), query, key), rtol=0, atol=5e-5)


@pytest.mark.parametrize("config", FIXED, ids=str)
def test_an_axis_changes_the_dimensions_of_its_own_pairs_only(config):
    part = map_of(config)
    coordinates = scattered(axes_of(config))
    _, sine = part.phases(at(coordinates))
    turned_by: list[set[int]] = []
    for axis in range(len(coordinates)):
        other = coordinates.clone()
        other[axis] += 1
        changed = (part.phases(at(other))[1] != sine).any(dim=1)[0]
        turned_by.append(set(changed.nonzero().flatten().tolist()))
    assert all(turned_by)
    assert set.union(*turned_by) == set(range(part.rotary_dim))
    assert sum(map(len, turned_by)) == part.rotary_dim


def test_the_grid_is_filled_row_by_row():
    ids = torch.tensor([[-1, 0, 1, 2, 3, 4, 11, 12]])
    assert grid_coordinates(ids, (3,)).tolist() == [[[0, 0, 0, 0, 1, 1, 3, 4]], [[0, 0, 1, 2, 0, 1, 2, 0]]]
    assert grid_coordinates(ids, (2, 3))[:, 0, -1].tolist() == [2, 0, 0]
    assert grid_coordinates(ids, (2, 3))[:, 0, -2].tolist() == [1, 1, 2]
    assert grid_coordinates(ids, (3,), 1)[:, 0].tolist() == [[0, 0, 0, 0, 0, 1, 3, 3], [0, 0, 0, 1, 2, 0, 1, 2]]


def test_given_coordinates_win_over_the_grid():
    query, key = query_and_key()
    config = RopeNdConfig(grid=(WIDTH,))
    same = at(grid_coordinates(plain().ids, (WIDTH,)))
    assert torch.equal(logits_of(config, same, query, key), logits_of(config, plain(), query, key))
    other = at(grid_coordinates(plain().ids, (WIDTH + 1,)))
    assert (logits_of(config, other, query, key) - logits_of(config, plain(), query, key)).abs().max() > 0.1


@pytest.mark.parametrize("grid", [(4,), (3, 4)])
def test_mixed_frequencies_start_as_axial_ones_turned(grid):
    """A rotation of the axes keeps the length of every pair's direction."""
    part = map_of(RopeNdConfig(grid=grid, assignment="mixed"))
    axial = axial_frequencies(10.0, HEAD_DIM, len(grid) + 1, "block")
    lengths = part.frequencies.detach().norm(dim=0)
    torch.testing.assert_close(lengths, axial.norm(dim=0).expand_as(lengths), rtol=1e-5, atol=1e-6)
    # One rotation for all pairs of a head: angles between directions are those between axes.
    for head in part.frequencies.detach().unbind(1):
        torch.testing.assert_close(head.T @ head, axial.T @ axial, rtol=0, atol=1e-5)
    assert (part.frequencies[:, 0] - part.frequencies[:, 1]).abs().max() > 1e-2


def test_drawn_axes_share_a_draw_and_stay_in_range():
    """Text has equal axes and keeps them equal; an axis that reaches further than positions counts too."""
    part = map_of(RandomizedConfig(MRopeConfig(), max_position=40)).train()
    coordinates = plain().ids.expand(3, 1, -1).clone()
    coordinates[2] += 20
    new = part.position_map.renumber(at(coordinates))
    assert torch.equal(new.coordinates[0], new.ids)
    assert torch.equal(new.coordinates[1], new.ids)
    assert (new.coordinates[2] > new.ids).all()
    assert new.coordinates.min() >= 0
    assert new.coordinates.max() < 40


def test_only_mixed_frequencies_belong_to_a_layer():
    assert RopeNdConfig(assignment="mixed").per_layer
    assert not any(config.per_layer for config in FIXED)
    assert dataclasses.replace(RopeNdConfig(), grid=[4]).grid == (4,)
