from __future__ import annotations

import numpy as np
import pytest
import torch

from training.data.text import RowMasking
from training.objectives import IGNORED
from training.study.settings import TrainingSettings
from training.study.tasks.text import TrainingWindows, validation_batch, validation_windows

STREAM = np.random.default_rng(0).integers(3, 259, size=1000).astype(np.int32)


@pytest.fixture(scope="module")
def settings():
    return TrainingSettings(train_length=16, max_steps=40, batch_size=4, eval_windows=5)


def test_every_window_comes_once_per_epoch(settings):
    windows = TrainingWindows(STREAM, settings, seed=0)
    assert len(windows) == 160
    assert sorted(windows.order[:62]) == list(range(62))
    assert sorted(windows.order[62:124]) == list(range(62))
    item = windows[3]
    assert torch.equal(item["labels"], item["input_ids"])
    assert item["input_ids"].tolist() == STREAM[windows.order[3] * 16 :][:16].tolist()
    assert not np.array_equal(windows.order, TrainingWindows(STREAM, settings, seed=1).order)


def test_masks_depend_on_the_row_and_the_seed_alone(tokenizer, settings):
    def windows(seed):
        return TrainingWindows(STREAM, settings, seed, RowMasking(tokenizer, 0.15, seed))

    first, again = windows(0), windows(0)
    expected = [first[index] for index in range(8, 12)]
    torch.manual_seed(99)
    for index in (11, 9):
        assert all(torch.equal(again[index][name], expected[index - 8][name]) for name in ("input_ids", "labels"))
    masked = torch.stack([item["labels"] != IGNORED for item in expected])
    assert masked.any()
    assert not torch.equal(torch.stack([windows(1)[index]["labels"] != IGNORED for index in range(8, 12)]), masked)


def test_evaluation_shows_every_masked_target_as_the_mask_token(tokenizer, settings):
    windows = validation_windows(STREAM, settings)
    assert windows.shape == (5, 64)
    batch = validation_batch(windows, tokenizer, causal=False, mlm_probability=0.15)
    targets = batch["labels"] != IGNORED
    assert 0.05 < targets.float().mean() < 0.3
    assert (batch["input_ids"][targets] == tokenizer.mask_token_id).all()
    assert torch.equal(batch["labels"][targets], windows[targets])
    assert torch.equal(batch["input_ids"][~targets], windows[~targets])
