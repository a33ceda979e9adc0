"""Summed cross-entropy over the targets, so that the mean does not depend on how a batch is split.

The targets are tokens, or rows for a classifier.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

from hf_posenc.recipes.distillation import IGNORED as IGNORED


def summed_cross_entropy(logits: Tensor, labels: Tensor, causal: bool, label_smoothing: float = 0.0) -> Tensor:
    """Computes the sum over all targets in nats, in float32; zero (with a gradient) if there are no targets.

    Args:
        logits: `(batch, length, vocabulary)`, or `(batch, classes)` for a classifier.
        labels: `(batch, length)`, or `(batch,)` for a classifier; `IGNORED` where there is no target.
        causal: whether each place predicts the next token, rather than its own.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
    """
    logits, labels = _predicting(logits, labels, causal)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def target_count(labels: Tensor, causal: bool) -> Tensor:
    """Counts the targets in `(batch, length)` labels, or `(batch,)` for a classifier."""
    return (labels[:, 1:] if causal else labels).ne(IGNORED).sum()


def row_sums(logits: Tensor, labels: Tensor, causal: bool) -> Tensor:
    """Returns float64 sums of each row: its cross-entropy and its number of targets, `(batch, 2)`.

    For a classifier, `(batch, 3)`. The third value is 1 if the class with the largest logit is right.
    """
    classifies = labels.dim() == 1
    logits, labels = _predicting(logits, labels, causal)
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2).float(), labels, ignore_index=IGNORED, reduction="none"
    )
    of_tokens = [losses, labels.ne(IGNORED), *([logits.argmax(-1) == labels] if classifies else [])]
    return torch.stack([values.double().sum(1) for values in of_tokens], dim=1)


def _predicting(logits: Tensor, labels: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns logits `(batch, length, classes)` and the labels that they predict, `(batch, length)`."""
    labels = labels.to(logits.device)
    if labels.dim() == 1:
        return logits.unsqueeze(1), labels.unsqueeze(1)
    return (logits[:, :-1], labels[:, 1:]) if causal else (logits, labels)


def evaluation_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Computes the loss in nats per target from the `row_sums` of all rows, and its perplexity or the accuracy."""
    sums: Any = prediction.predictions
    total, count, *right = np.asarray(sums, dtype=np.float64).sum(axis=0)
    loss, *accuracy = (float(part / count) if count else math.nan for part in (total, *right))
    if accuracy:
        return {"loss": loss, "accuracy": accuracy[0]}
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)) if math.isfinite(loss) else loss}
