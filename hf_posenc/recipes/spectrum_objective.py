"""The objective of a search for RoPE's factors: the loss of the end of long texts, and of spans repeated there."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

#: What a token of the last quarter of a text is.
_TEXT, _NEEDLE, _LEFT_OUT = 0, 1, 2
#: Repeated spans take at most this share of the tokens that count.
_NEEDLE_SHARE = 4


def with_needles(tokens: Tensor, needle_tokens: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """The texts with spans from somewhere before, repeated at equal distances in their last quarter.

    Args:
        tokens: `(texts, length)` token ids.
        needle_tokens: tokens of a span; 0 repeats none.
        generator: of the places that spans are taken from.

    Returns:
        The texts, and what the tokens of their last quarter are, `(counted,)`: `_TEXT`, `_NEEDLE`, or `_LEFT_OUT` for
        the first quarter of a span, which is a hint, and the token after it.
    """
    length = tokens.shape[1]
    counted = length - length * 3 // 4
    texts, kinds = tokens.clone(), torch.full((counted,), _TEXT)
    number = max(1, counted // (_NEEDLE_SHARE * needle_tokens)) if needle_tokens else 0
    for last in range(1, number + 1):
        stop = counted * last // number
        start, hint = stop - needle_tokens, needle_tokens // 4
        kinds[start : start + hint], kinds[start + hint : stop], kinds[stop : stop + 1] = _LEFT_OUT, _NEEDLE, _LEFT_OUT
        for text, source in zip(texts, tokens, strict=True):
            place = int(generator.integers(0, length // 2))
            text[length - counted + start : length - counted + stop] = source[place : place + needle_tokens]
    return texts, kinds.to(tokens.device)


def objective(model: PreTrainedModel, texts: Tensor, kinds: Tensor, needle_weight: float) -> float:
    """A mean of the loss of the last quarter of the texts and that of the repeated spans; infinity if it is not finite.

    Args:
        model: a causal model, in evaluation mode.
        texts: `(texts, length)` token ids, from `with_needles`.
        kinds: `(counted,)`, from `with_needles`.
        needle_weight: share of the repeated spans, 0 to 1.
    """
    # The logits of a whole text of a large vocabulary can take more memory than the model.
    counted = len(kinds)
    keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    options: dict[str, Any] = {"logits_to_keep": counted + 1} if keeps else {}
    losses = []
    for text in texts:
        logits = model(input_ids=text.unsqueeze(0), use_cache=False, **options).logits[0, -counted - 1 : -1].float()
        losses.append(functional.cross_entropy(logits, text[-counted:], reduction="none"))
    by_token = torch.stack(losses).mean(0)
    loss = (1 - needle_weight) * float(by_token[kinds == _TEXT].mean())
    if needle_weight:
        loss += needle_weight * float(by_token[kinds == _NEEDLE].mean())
    return loss if math.isfinite(loss) else math.inf
