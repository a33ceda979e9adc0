"""Windows of tokens with targets, and cross-entropy at every token of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.forward import check_vocabulary, logits_of, predicts_next_token, refuse_encoder_decoder
from hf_posenc.metrics.sensitivity_material import ENGLISH

#: The label of a token that is not a target, as in PyTorch and transformers.
IGNORED = -100
#: Tokens per forward call, which bounds memory.
TOKENS_PER_BATCH = 4096
#: Targets whose losses are computed at once. Few are, because copies of logits are as wide as the vocabulary.
_TARGETS_AT_ONCE = 1024
#: Why `mean_loss` has no number, if there are targets.
NOT_FINITE = "The loss is not a finite number."


def token_losses(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    causal: bool | None = None,
    *,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> Tensor:
    """Computes the cross-entropy in nats at every token.

    A loss is at the place of its target: in a causal model, one place after the prediction. The model runs in
    evaluation mode and is left unchanged.

    Args:
        model: a causal or masked language model of transformers, patched or not.
        input_ids: `(sequences, length)` int64, without padding.
        labels: `(sequences, length)`, the token to predict at each place, not shifted; -100 for no target.
        causal: whether the logits at a token predict the next one; `None` measures it, see `predicts_next_token`.
        tokens_per_batch: tokens per forward call, at least one sequence.

    Returns:
        `(sequences, length)` float32 on the CPU: NaN at tokens that are not targets, which in a causal model always
        include the first one of a sequence, and infinity where the model's logits are NaN.

    Raises:
        SequenceLengthError: if the model has too few positions for the sequence.
        MeasurementError: if the input is not a batch of tokens with labels.
        UnsupportedError: for a model without one row of logits per token.
    """
    check_batch(model, input_ids, labels, tokens_per_batch)
    causal = predicts_next_token(model, input_ids) if causal is None else causal
    rows = max(1, tokens_per_batch // input_ids.shape[1])
    batches = zip(input_ids.split(rows), labels.split(rows), strict=True)
    return torch.cat([_losses_of(logits_of(model, ids), targets, causal) for ids, targets in batches])


def check_batch(model: Any, input_ids: Tensor, labels: Tensor, tokens_per_batch: int) -> None:
    """Refuses shapes, tokens and labels that do not fit, and encoder-decoders."""
    refuse_encoder_decoder(model)
    if input_ids.dim() != 2 or input_ids.numel() == 0 or labels.shape != input_ids.shape:
        raise MeasurementError(
            f"input_ids and labels must be the same (sequences, length) with at least one token, got "
            f"{tuple(input_ids.shape)} and {tuple(labels.shape)}."
        )
    if tokens_per_batch < 1:
        raise MeasurementError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}.")
    targets = labels[labels != IGNORED]
    if targets.numel() == 0:
        raise MeasurementError(f"labels has no target: every label is {IGNORED}.")
    check_vocabulary(model, *(int(end) for ids in (input_ids, targets) for end in (ids.min(), ids.max())))


def _losses_of(logits: Tensor, labels: Tensor, causal: bool) -> Tensor:
    targets = labels.to(logits.device)
    losses = torch.full(targets.shape, float("nan"), device=logits.device)
    if causal:
        logits, targets = logits[:, :-1], targets[:, 1:]
    wanted = targets != IGNORED
    if not bool(wanted.any()):
        return losses.cpu()
    rows = wanted.nonzero().split(_TARGETS_AT_ONCE)
    pairs = ((logits[places].float(), targets[places]) for places in (indices.unbind(-1) for indices in rows))
    values = [torch.nn.functional.cross_entropy(*pair, reduction="none") for pair in pairs]
    # NaN marks tokens that are not targets. A model with NaN logits gives probability 0 to every token.
    finite = torch.cat(values).nan_to_num(nan=torch.inf, posinf=torch.inf)
    (losses[:, 1:] if causal else losses)[wanted] = finite
    return losses.cpu()


def mean_loss(losses: Tensor) -> float | None:
    """Returns the mean over targets; `None` if there are none, or it is not finite."""
    mean = float(losses.double().nanmean()) if losses.numel() else math.nan
    return mean if math.isfinite(mean) else None


@dataclass(frozen=True)
class Frame:
    """Special tokens around every piece, as the model saw them in training.

    Args:
        before: ids such as BOS or [CLS]; not targets.
        after: ids such as [SEP]; not targets.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of special tokens in a sequence."""
        return len(self.before) + len(self.after)

    def around(self, tokens: Tensor, *, targets: bool) -> Tensor:
        """`(sequences, n)` -> `(sequences, n + size)`; in labels, special tokens are not targets."""
        ends = [
            torch.tensor([IGNORED] * len(ids) if targets else ids, dtype=tokens.dtype).expand(tokens.shape[0], -1)
            for ids in (self.before, self.after)
        ]
        return torch.cat([ends[0], tokens.cpu(), ends[1]], dim=1)


def token_stream(tokenizer: Any, texts: Iterable[str]) -> Tensor:
    """Returns `(tokens,)` int64: the texts in order, each followed by the tokenizer's end token if it has one."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        stream += [] if end is None else [end]
    return torch.tensor(stream, dtype=torch.int64)


def stream_windows(stream: Tensor, length: int, *, max_windows: int | None = None, overlap: bool = False) -> Tensor:
    """Cuts windows `(windows, length)` from a text `(tokens,)`, evenly spread over it, with or without `overlap`.

    At most `max_windows`, by default all that fit. A window may contain parts of several documents.

    Raises:
        MeasurementError: if the stream is shorter than one window.
    """
    if length < 1 or (max_windows is not None and max_windows < 1):
        raise MeasurementError(f"At least one window of one token is needed, got {max_windows} of {length}.")
    fitting = max(0, stream.shape[0] - length + 1) if overlap else stream.shape[0] // length
    if fitting == 0:
        raise MeasurementError(
            f"The text has {stream.shape[0]} tokens, but one window needs {length}. Use more text, or shorter lengths."
        )
    count = fitting if max_windows is None else min(max_windows, fitting)
    starts = torch.linspace(0, stream.shape[0] - length, count, dtype=torch.float64).long().tolist()
    return torch.stack([stream[start : start + length] for start in starts])


def text_windows(tokenizer: Any, texts: Iterable[str] | None, length: int, max_windows: int | None) -> Tensor:
    """Returns `stream_windows` of texts, by default of a short English text."""
    stream = token_stream(tokenizer, [ENGLISH.passage] if texts is None else texts)
    return stream_windows(stream, length, max_windows=max_windows)


def causal_targets(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels for a causal model: every token except the first of a window, which has no context."""
    labels = windows.clone()
    labels[:, 0] = IGNORED
    return windows, labels


def masked_targets(
    windows: Tensor, mask_token_id: int, *, probability: float = 0.15, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels for a masked model, which do not depend on the model or the scheme.

    Every target is shown as the mask token, without the random and unchanged tokens of training, so that a model that
    knows only frequencies scores the unigram cross-entropy.

    Args:
        windows: `(windows, length)`.
        mask_token_id: the id of the mask token.
        probability: probability that a token is a target (BERT, arXiv:1810.04805: 0.15).
        seed: seed of the draw; the random state of the process does not change.
    """
    if not 0 < probability < 1:
        raise MeasurementError(f"The probability of a mask must be between 0 and 1, got {probability}.")
    draw = torch.rand(windows.shape, generator=torch.Generator().manual_seed(seed))
    chosen = draw < probability
    return windows.masked_fill(chosen, mask_token_id), windows.masked_fill(~chosen, IGNORED)


def language_targets(
    model: Any, tokenizer: Any, windows: Tensor, *, causal: bool, probability: float = 0.15, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns `causal_targets`, or `masked_targets` for a model that sees both sides."""
    if causal:
        return causal_targets(windows)
    if tokenizer.mask_token_id is None:
        raise MeasurementError(
            f"{type(model).__name__} sees both sides of a token, so it is measured on masked tokens, but the tokenizer "
            f"{type(tokenizer).__name__} has no mask token. Use the tokenizer of the model, or set its mask_token."
        )
    return masked_targets(windows, tokenizer.mask_token_id, probability=probability, seed=seed)


def special_frame(tokenizer: Any, *, causal: bool) -> Frame:
    """Returns the special tokens that the tokenizer puts around a text; for a causal model, none after it."""
    content = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(content) + 1):
        if whole[start : start + len(content)] == content:
            after = () if causal else tuple(whole[start + len(content) :])
            return Frame(tuple(whole[:start]), after)
    raise MeasurementError(
        f"The tokenizer {type(tokenizer).__name__} encodes a text differently with special tokens than without, so "
        f"they cannot be put around pieces of a text. Measure without special tokens."
    )
