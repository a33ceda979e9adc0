"""PoSE: the positions of a longer text for the tokens of a short one."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_posenc.recipes import pose_positions

from .test_perturbed_positions import DOCUMENTS, _generator, _rows


@settings(max_examples=80, deadline=None)
@given(documents=DOCUMENTS, seed=st.integers(0, 999), room=st.integers(0, 30), chunks=st.integers(2, 5))
def test_chunks_follow_each_other_within_the_target(documents, seed, room, chunks):
    positions, real, places = _rows(documents)
    target = max(max(row) for row in documents) + room
    shown = real.long() if seed % 2 else real  # As an attention mask shows them.
    moved = pose_positions(positions, target, chunks=chunks, real=shown, generator=_generator(seed))
    assert torch.equal(moved[~real], positions[~real])
    for row, of_row in enumerate(places):
        for start, end in of_row:
            drawn = moved[row, start:end].tolist()
            steps = [after - before for before, after in itertools.pairwise(drawn)]
            assert drawn[0] == 0
            assert all(step >= 1 for step in steps)
            assert drawn[-1] < target
            assert sum(step > 1 for step in steps) < chunks


def authors_positions(length: int, target: int, draw: random.Random) -> list[int]:
    """PoSE 43b43b3, `train_preprocess_function_pose`: the positions of one example."""
    first = draw.randint(1, (length + 1) // 2)
    skip = draw.randint(0, target - length)
    return [position if position < first else position + skip for position in range(length)]


@pytest.mark.parametrize("length", [5, 6])
def test_two_chunks_are_drawn_as_in_the_authors_code(length):
    draws, target, draw = 6000, length + 3, random.Random(0)
    found = pose_positions(torch.arange(length).expand(draws, length), target, generator=_generator(1))
    counts: dict[tuple[int, ...], list[int]] = {}
    for row in found.tolist():
        counts.setdefault(tuple(row), [0, 0])[0] += 1
    for _ in range(draws):
        counts.setdefault(tuple(authors_positions(length, target, draw)), [0, 0])[1] += 1
    # Three boundaries with three skips each, and no skip.
    assert len(counts) == 10
    for ours, theirs in counts.values():
        # Probabilities of 1/12, and 1/4 without a skip; five standard deviations of the difference of two counts.
        assert abs(ours - theirs) < 5 * (ours + theirs) ** 0.5
        assert min(ours, theirs) > 390


def test_three_chunks_skip_twice():
    moved = pose_positions(torch.arange(9).expand(3000, 9), 30, chunks=3, generator=_generator())
    skips = (moved.diff(dim=-1) > 1).sum(-1).bincount(minlength=3)
    # Most examples skip twice; the first skip is 0 in one of 22.
    assert int(skips[2]) > 2000
    assert int(skips[1]) > 300
    assert int(moved.max()) == 29
    assert pose_positions(torch.zeros(0, 8, dtype=torch.int64), 40).shape == (0, 8)
