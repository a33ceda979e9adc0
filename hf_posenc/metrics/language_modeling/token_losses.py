"""Cross-entropy at every token of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError, UnsupportedError
from hf_posenc.metrics.forward import check_vocabulary, logits_of, predicts_next_token
from hf_posenc.preserve import evaluation_mode

#: The label of a token that is not a target, in PyTorch and transformers alike.
IGNORED = -100
#: Tokens per forward call, which bounds memory.
TOKENS_PER_BATCH = 4096
#: Targets whose logits are turned into losses at once: the copies that this makes are as wide as the vocabulary.
_TARGETS_AT_ONCE = 1024


def token_losses(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    causal: bool | None = None,
    *,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> Tensor:
    """Cross-entropy in nats at every token.

    The loss stands where the target stands: in a causal model, one place after the prediction. The model runs in
    evaluation mode and is left as it was found.

    Args:
        model: a causal or masked language model of transformers, patched or not.
        input_ids: `(sequences, length)` int64, without padding.
        labels: `(sequences, length)`, the token that should be predicted at each place, not shifted; -100 at tokens
            that are no target.
        causal: whether the logits at a token predict the next one; `None` finds out, see `predicts_next_token`.
        tokens_per_batch: tokens per forward call, at least one sequence.

    Returns:
        `(sequences, length)` float32 on the CPU; NaN where the token is no target, which the first token of a
        sequence never is in a causal model, and infinity where the model's logits are NaN.

    Raises:
        SequenceLengthError: if the model has no positions for so long a sequence.
        MeasurementError: for input that is no batch of tokens with labels.
        UnsupportedError: for a model without one row of logits per token.
    """
    check_batch(model, input_ids, labels, tokens_per_batch)
    causal = predicts_next_token(model, input_ids) if causal is None else causal
    rows = max(1, tokens_per_batch // input_ids.shape[1])
    batches = zip(input_ids.split(rows), labels.split(rows), strict=True)
    with evaluation_mode(model):
        return torch.cat([_losses_of(logits_of(model, ids), targets, causal) for ids, targets in batches])


def check_batch(model: Any, input_ids: Tensor, labels: Tensor, tokens_per_batch: int) -> None:
    """Refuses shapes, tokens and labels that do not fit, and encoder-decoders: a decoder would get the text twice."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{type(model).__name__} is an encoder-decoder, which does not score a text by itself. Use a causal or a "
            f"masked language model."
        )
    if input_ids.dim() != 2 or input_ids.numel() == 0 or labels.shape != input_ids.shape:
        raise MeasurementError(
            f"input_ids and labels must be the same (sequences, length) with at least one token, got "
            f"{tuple(input_ids.shape)} and {tuple(labels.shape)}."
        )
    if tokens_per_batch < 1:
        raise MeasurementError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}.")
    targets = labels[labels != IGNORED]
    if targets.numel() == 0:
        raise MeasurementError(f"labels holds no target: every label is {IGNORED}.")
    check_vocabulary(model, *(int(one) for ids in (input_ids, targets) for one in (ids.min(), ids.max())))


def _losses_of(logits: Tensor, labels: Tensor, causal: bool) -> Tensor:
    targets = labels.to(logits.device)
    losses = torch.full(targets.shape, float("nan"), device=logits.device)
    if causal:
        logits, targets = logits[:, :-1], targets[:, 1:]
    wanted = targets != IGNORED
    if not bool(wanted.any()):
        return losses.cpu()
    rows = wanted.nonzero().split(_TARGETS_AT_ONCE)
    values = [
        torch.nn.functional.cross_entropy(logits[row, place].float(), targets[row, place], reduction="none")
        for row, place in (indices.unbind(-1) for indices in rows)
    ]
    # NaN says that a token is no target. A model whose logits are none gives no probability to any.
    found = torch.cat(values).nan_to_num(nan=torch.inf, posinf=torch.inf)
    (losses[:, 1:] if causal else losses)[wanted] = found
    return losses.cpu()
