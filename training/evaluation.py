"""Loss by length and by position, on the same text for every length."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from training.batches import IGNORED
from training.settings import CompareSettings

#: Tokens per evaluation batch, which bounds memory.
TOKENS_PER_BATCH = 8192
#: The last targets of a sequence, the ones with the longest context.
TAIL = 32


@torch.no_grad()
def token_losses(model: Any, input_ids: Tensor, labels: Tensor, causal: bool) -> Tensor:
    """Cross-entropy in nats at every token, `(sequences, length)`; NaN where the token is no target.

    The loss stands where the target stands: in a causal model, one place after the prediction.
    """
    device = next(model.parameters()).device
    rows = max(1, TOKENS_PER_BATCH // input_ids.shape[1])
    model.eval()
    parts = []
    for ids, targets in zip(input_ids.split(rows), labels.split(rows), strict=True):
        logits = model(input_ids=ids.to(device)).logits.float()
        targets = targets.to(device)
        losses = torch.full(targets.shape, float("nan"), device=device)
        if causal:
            logits, targets = logits[:, :-1], targets[:, 1:]
        wanted = targets != IGNORED
        values = torch.nn.functional.cross_entropy(logits[wanted], targets[wanted], reduction="none")
        (losses[:, 1:] if causal else losses)[wanted] = values
        parts.append(losses.cpu())
    model.train()
    return torch.cat(parts)


def validation_loss(model: Any, batch: dict[str, Tensor], settings: CompareSettings, causal: bool) -> float:
    """Mean loss at the training length, over the last `train_length` tokens of every window."""
    length = settings.train_length
    losses = token_losses(model, batch["input_ids"][:, -length:], batch["labels"][:, -length:], causal)
    return float(losses.nanmean())


def loss_by_length(model: Any, batch: dict[str, Tensor], settings: CompareSettings, causal: bool) -> dict[str, Any]:
    """What a model that was trained at one length does at longer ones.

    Every length reads the same windows of `max_length` tokens, cut into pieces of that length whose positions start
    at 0. The tail, the last targets of each window, is the same set of targets at every length: only the context
    before it grows.

    Returns:
        `lengths`; `loss` and `tail_loss`, one number per length; `position_edges` and `position_loss`, the loss in
        bins of the position at the longest length. `None` stands for a loss that is no number, such as that of a bin
        without targets.
    """
    lengths = settings.lengths
    tail = min(TAIL, settings.train_length // 2)
    mean: list[float] = []
    tail_mean: list[float] = []
    losses = torch.empty(0)
    for length in lengths:
        ids, labels = (_pieces(batch[name], length) for name in ("input_ids", "labels"))
        losses = token_losses(model, ids, labels, causal)
        mean.append(float(losses.nanmean()))
        last_piece = losses.view(-1, settings.max_length)[:, -tail:]
        tail_mean.append(float(last_piece.nanmean()))
    edges = [*range(0, settings.max_length, max(1, settings.train_length // 4)), settings.max_length]
    bins = [float(losses[:, start:stop].nanmean()) for start, stop in itertools.pairwise(edges)]
    return {
        "lengths": lengths,
        "loss": _rounded(mean),
        "tail_loss": _rounded(tail_mean),
        "tail_tokens": tail,
        "position_edges": edges,
        "position_loss": _rounded(bins),
    }


def _pieces(tokens: Tensor, length: int) -> Tensor:
    return tokens.reshape(-1, length)


def _rounded(values: list[float]) -> list[float | None]:
    return [round(value, 4) if math.isfinite(value) else None for value in values]
