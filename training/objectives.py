"""Cross-entropy over the tokens that are targets, summed, so that every way to cut a batch gives the same mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

#: The label of a token that is not a target, in PyTorch and transformers alike.
IGNORED = -100


def aligned(logits: Tensor, labels: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Predictions beside their targets.

    Args:
        logits: `(batch, length, vocabulary)`.
        labels: `(batch, length)`, `IGNORED` where a token is no target.
        causal: whether a place predicts the token after it, rather than its own.

    Returns:
        Logits and labels of the places that predict; one place fewer if causal.
    """
    return (logits[:, :-1], labels[:, 1:]) if causal else (logits, labels)


def summed_cross_entropy(logits: Tensor, labels: Tensor, causal: bool, label_smoothing: float = 0.0) -> Tensor:
    """The sum over all targets, in nats, in float32; zero (with a gradient) where nothing is a target."""
    logits, labels = aligned(logits, labels, causal)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten().to(logits.device),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def target_count(labels: Tensor, causal: bool) -> Tensor:
    """How many tokens of `(batch, length)` labels are targets."""
    return (labels[:, 1:] if causal else labels).ne(IGNORED).sum()


def row_sums(logits: Tensor, labels: Tensor, causal: bool) -> Tensor:
    """`(batch, 2)` float64: the summed cross-entropy of each row, and its number of targets."""
    logits, labels = aligned(logits, labels, causal)
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2).float(), labels.to(logits.device), ignore_index=IGNORED, reduction="none"
    )
    return torch.stack([losses.double().sum(1), labels.ne(IGNORED).sum(1).to(losses.device).double()], dim=1)


def evaluation_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Loss in nats per target token, and its perplexity, from the `row_sums` of all rows.

    A mean over tokens, not over batches: it does not depend on how the rows were dealt out to batches and processes.
    """
    sums: Any = prediction.predictions
    total, count = np.asarray(sums, dtype=np.float64).sum(axis=0)
    loss = float(total / count) if count else float("nan")
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)) if math.isfinite(loss) else loss}
