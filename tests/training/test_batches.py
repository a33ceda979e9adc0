from __future__ import annotations

import numpy as np
import pytest
import torch

from training.batches import IGNORED, Collator, TrainingWindows, validation_batch, validation_windows
from training.corpus import load_tokenizer
from training.evaluation import loss_by_length, token_losses
from training.settings import CompareSettings

STREAM = np.random.default_rng(0).integers(3, 259, size=1000).astype(np.int32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(None)


@pytest.fixture(scope="module")
def settings():
    return CompareSettings(train_length=16, max_steps=40, batch_size=4, eval_windows=5)


def test_every_window_comes_once_per_epoch(settings):
    windows = TrainingWindows(STREAM, settings)
    assert len(windows) == 160
    assert sorted(windows.order[:62]) == list(range(62))
    assert sorted(windows.order[62:124]) == list(range(62))
    index, tokens = windows[3]
    assert index == 3
    assert tokens.tolist() == STREAM[windows.order[3] * 16 :][:16].tolist()


def test_masks_depend_on_the_place_and_not_on_what_came_before(tokenizer, settings):
    windows = TrainingWindows(STREAM, settings)
    items = [windows[index] for index in range(8, 12)]
    first = Collator(tokenizer, "masked", settings)(items)
    used = Collator(tokenizer, "masked", settings)
    used([windows[index] for index in range(4)])
    torch.manual_seed(99)
    again = used(items)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert torch.equal(first["labels"], again["labels"])
    other = used([windows[index] for index in range(12, 16)])
    assert not torch.equal(other["labels"] == IGNORED, first["labels"] == IGNORED)


def test_causal_batches_are_the_text_itself(tokenizer, settings):
    batch = Collator(tokenizer, "causal", settings)([TrainingWindows(STREAM, settings)[0]])
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_evaluation_shows_every_masked_target_as_the_mask_token(tokenizer, settings):
    windows = validation_windows(STREAM, settings)
    assert windows.shape == (5, 64)
    batch = validation_batch(windows, tokenizer, "masked", settings)
    targets = batch["labels"] != IGNORED
    assert 0.05 < targets.float().mean() < 0.3
    assert (batch["input_ids"][targets] == tokenizer.mask_token_id).all()
    assert torch.equal(batch["labels"][targets], windows[targets])
    assert torch.equal(batch["input_ids"][~targets], windows[~targets])


class _KnowsPositions(torch.nn.Module):
    """Predicts token `(position + 1) % 7` with certainty: its loss tells which position a target stood at."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor):
        ahead = (torch.arange(input_ids.shape[1]) + 1) % 7
        logits = torch.nn.functional.one_hot(ahead, 7).float() * 100
        return type("Output", (), {"logits": logits.expand(input_ids.shape[0], -1, -1)})


def test_causal_losses_stand_at_their_targets():
    ids = (torch.arange(10) % 7).unsqueeze(0)
    ids[0, 4] = 0
    losses = token_losses(_KnowsPositions(), ids, ids, causal=True)
    assert losses[0, 0].isnan()
    assert (losses[0, 1:] > 1).nonzero().flatten().tolist() == [3]


def test_loss_by_length_reads_the_same_text_in_pieces():
    settings = CompareSettings(train_length=14, length_factor=4)
    ids = (torch.arange(56) % 7).repeat(2, 1)
    labels = ids.clone()
    labels[:, 0] = IGNORED
    result = loss_by_length(_KnowsPositions(), {"input_ids": ids, "labels": labels}, settings, causal=True)
    assert result["lengths"] == [14, 28, 56]
    assert result["loss"] == result["tail_loss"] == [0.0, 0.0, 0.0]
    shifted = ids.roll(14 * 3 + 3, dims=1)
    by_length = loss_by_length(_KnowsPositions(), {"input_ids": shifted, "labels": shifted}, settings, causal=True)
    assert min(by_length["loss"]) > 10


def test_tail_is_the_same_targets_at_every_length():
    settings = CompareSettings(train_length=8, length_factor=2)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    ids[0, -4:] = torch.tensor([4, 5, 6, 0])
    result = loss_by_length(_KnowsPositions(), {"input_ids": ids, "labels": ids}, settings, causal=True)
    assert result["tail_tokens"] == 4
    assert result["tail_loss"] == [0.0, 100.0]


def test_a_bin_without_targets_has_no_number():
    settings = CompareSettings(train_length=8, length_factor=2)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    labels[0, 9] = 0
    result = loss_by_length(_KnowsPositions(), {"input_ids": ids, "labels": labels}, settings, causal=False)
    assert result["position_loss"].count(None) == 7
    assert result["position_edges"] == list(range(0, 17, 2))
