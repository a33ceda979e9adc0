"""Compares a GGUF file, run by llama.cpp, with the model that it was made from."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.export.gguf.run import predict
from hf_posenc.export.samples import random_ids, spans

#: New tokens per prompt. The first is predicted from the prompt, the others with llama.cpp's cache.
_STEPS = 8
#: Probabilities are compared for this many of llama.cpp's most probable tokens.
_TOP = 4096
#: Lengths of prompts in tokens. A constant spectrum is compared well enough by these, because an error of a frequency
#: grows with the position from the start. ALiBi's steepest head sees about 10 tokens, and its flattest 4000.
_LENGTHS = (5, 48, 512)
#: A prompt that is longer than the original length of a scaling is added if it has at most this length.
_LONGEST = 2048


@dataclass(frozen=True)
class Difference:
    """The largest differences between two programs.

    Args:
        logits: of the logits minus their mean, relative to the largest where that exceeds 1.
        probabilities: of the probabilities of the next token.
    """

    logits: float
    probabilities: float

    def worst(self, other: Difference) -> Difference:
        """The larger of each. A difference that is not a number is the largest."""
        pairs = ((self.logits, other.logits), (self.probabilities, other.probabilities))
        return Difference(*(max(pair, key=lambda value: (value != value, value)) for pair in pairs))


@torch.no_grad()
def compare(model: PreTrainedModel, file: Path) -> dict[str, Difference]:
    """Runs prompts of several lengths in both programs, and decodes from each.

    Args:
        model: the model in float32.
        file: the exported file.

    Returns:
        The differences by mode: "prefill" and "decode".
    """
    prompts = _prompts(model)
    context = max(map(len, prompts)) + _STEPS
    predictions = predict(file, prompts, _STEPS, min(_TOP, _vocabulary(model)), context)
    found: dict[str, Difference] = {}
    for prompt, steps in zip(prompts, predictions, strict=True):
        # The model sees the tokens that llama.cpp chose, so that one early difference does not make all later ones.
        ids = torch.tensor([[*prompt, *(step.ids[0] for step in steps[:-1])]], device=model.device)
        logits = model(input_ids=ids, use_cache=False, **_last(model, _STEPS)).logits[0, -_STEPS:].float().cpu()
        for place, (expected, step) in enumerate(zip(logits, steps, strict=True)):
            mode, difference = "prefill" if place == 0 else "decode", difference_of(expected, step.ids, step.logprobs)
            found[mode] = found[mode].worst(difference) if mode in found else difference
    return found


def _prompts(model: PreTrainedModel) -> list[list[int]]:
    """Random tokens of several lengths, within the context of the file."""
    limit = int(model.config.get_text_config().max_position_embeddings) - _STEPS
    longer = {end for _, end in spans(model) if end <= _LONGEST}
    lengths = sorted({max(1, min(length, limit)) for length in {*_LENGTHS, *longer}})
    ids = random_ids(model, lengths[-1])[0].tolist()
    return [ids[:length] for length in lengths]


def _last(model: PreTrainedModel, count: int) -> dict[str, int]:
    """The argument for computing only the last logits, if the model has it."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def difference_of(expected: Tensor, ids: list[int], logprobs: list[float]) -> Difference:
    """Compares a prediction of llama.cpp with that of the model.

    Args:
        expected: the model's logits of the next token, or their logarithms of probabilities, `(vocabulary,)`.
        ids: llama.cpp's most probable tokens.
        logprobs: their log-probabilities.
    """
    found, places = torch.tensor(logprobs), torch.tensor(ids)
    found_logits, expected_logits = found - found.mean(), expected[places] - expected[places].mean()
    logits = (found_logits - expected_logits).abs().max() / expected_logits.abs().max().clamp(min=1.0)
    # A token that llama.cpp does not list is less probable there than all that it lists.
    dense = torch.zeros_like(expected).index_copy(0, places, found.exp())
    unlisted = torch.ones_like(expected, dtype=torch.bool).index_fill(0, places, False)
    gap = (expected.softmax(-1) - dense).abs()
    gap = gap.where(~unlisted, (gap - found.min().exp()).clamp(min=0))
    return Difference(float(logits), float(gap.max()))
