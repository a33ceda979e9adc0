"""What is compared between two programs: prompts of several lengths, and the largest differences by mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.export.samples import random_ids, spans

#: The largest differences by what was compared: "logits" (minus their mean, relative to the largest where that exceeds
#: 1), "probabilities" of the next token, and "hidden states" (relative to the largest where that exceeds 1).
Differences = dict[str, float]
#: Runs the model and compares it with what llama.cpp has returned, each time in a mode, "prefill" or "decode".
Measure = Callable[[], Iterable[tuple[str, Differences]]]
#: New tokens per prompt. The first is predicted from the prompt, the others with llama.cpp's cache.
STEPS = 8
#: Lengths of prompts in tokens. A constant spectrum is compared well enough by these, because an error of a frequency
#: grows with the position from the start. ALiBi's steepest head sees about 10 tokens, and its flattest 4000.
_LENGTHS = (5, 48, 512)
#: A prompt that is longer than the original length of a scaling is added if it has at most this length.
_LONGEST = 2048


def prompts_for(model: PreTrainedModel, most: int) -> list[list[int]]:
    """Random tokens of several lengths.

    Args:
        model: the model.
        most: the longest prompt.
    """
    longer = {end for _, end in spans(model) if end <= _LONGEST}
    lengths = sorted({max(1, min(length, most)) for length in {*_LENGTHS, *longer}})
    ids = random_ids(model, lengths[-1])[0].tolist()
    return [ids[:length] for length in lengths]


def token_differences(expected: Tensor, places: Tensor, logprobs: Tensor) -> Differences:
    """Differences of the prediction of a token.

    Args:
        expected: the model's logits, `(vocabulary,)` float32.
        places: the tokens that llama.cpp lists; others are less probable there than all of these.
        logprobs: their log-probabilities.
    """
    found_logits, expected_logits = logprobs - logprobs.mean(), expected[places] - expected[places].mean()
    logits = (found_logits - expected_logits).abs().max() / expected_logits.abs().max().clamp(min=1.0)
    dense = torch.zeros_like(expected).index_copy(0, places, logprobs.exp())
    unlisted = torch.ones_like(expected, dtype=torch.bool).index_fill(0, places, False)
    gap = (expected.softmax(-1) - dense).abs()
    gap = gap.where(~unlisted, (gap - logprobs.min().exp()).clamp(min=0))
    return {"logits": float(logits), "probabilities": float(gap.max())}


def by_mode(found: Iterable[tuple[str, Differences]]) -> dict[str, Differences]:
    """The largest differences of each mode. One that is not a number is the largest."""
    merged: dict[str, Differences] = {}
    for mode, differences in found:
        before = merged.setdefault(mode, dict(differences))
        for what, value in differences.items():
            before[what] = max(before[what], value, key=lambda one: (one != one, one))
    return merged


def largest(found: dict[str, Differences]) -> Differences:
    """The largest differences of all modes."""
    return by_mode(("", differences) for differences in found.values()).get("", {})
