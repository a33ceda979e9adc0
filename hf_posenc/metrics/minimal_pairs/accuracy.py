"""Does a model hold the right text of a pair for the likelier one?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.in_turn import measure_in_turn
from hf_posenc.metrics.language_modeling.token_losses import predicts_next_token
from hf_posenc.metrics.minimal_pairs.pairs import MinimalPair, MinimalPairsTask, read_minimal_pairs
from hf_posenc.metrics.minimal_pairs.result import ALL, ConditionAccuracy, MinimalPairsResult
from hf_posenc.metrics.minimal_pairs.scoring import TokenPair, causal_scores, encode_pairs, masked_scores
from hf_posenc.metrics.preserve import evaluation_mode
from hf_posenc.patching.apply import unwrapped
from hf_posenc.schemes.config import SchemeConfig


def minimal_pairs_accuracy(
    model: Any,
    tokenizer: Any,
    task: str | Path | MinimalPairsTask,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
) -> MinimalPairsResult:
    """How often a language model gives the right text of a minimal pair the higher probability.

    A causal model scores a pair by its log-probabilities, a masked one by its pseudo-log-likelihood; see `scoring`.
    Which of the two a model is, is measured on it. The model is left as it was found, also after an error.

    Args:
        model: a causal or masked language model, patched or not.
        tokenizer: its tokenizer.
        task: the path of a BIG-bench file (see `read_minimal_pairs`), or what was read from one.
        schemes: names or configs, patched into the stock model one after the other; `"native"` is the stock model
            itself. `None` measures the model as it is.
        samples: score so many pairs, drawn without replacement; `None` scores all.
        seed: of that choice, which is the same for every scheme and model, and of new weights of a scheme.

    Returns:
        One row per scheme. A scheme that the architecture cannot take, or that cannot represent so long a text, has its
        reason in `error`.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is touched.
        MeasurementError: if the task cannot be read, or the tokenizer does not do.
        UnsupportedError: for an encoder-decoder, or a model without logits.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{type(model).__name__} is an encoder-decoder, which does not score a text by itself. Load a causal or a "
            f"masked language model."
        )
    if not isinstance(task, MinimalPairsTask):
        task = read_minimal_pairs(task)
    pairs = _chosen(task.pairs, samples, seed)
    tokens = encode_pairs(tokenizer, [pair.texts for pair in pairs])
    _check_vocabulary(model, tokens)
    causal = predicts_next_token(model, torch.tensor([max((side for pair in tokens for side in pair), key=len)]))
    score = causal_scores if causal else masked_scores

    def measure(model: Any) -> tuple[ConditionAccuracy, ...]:
        with evaluation_mode(model):
            return _by_condition(pairs, score(model, tokenizer, tokens))

    rows = measure_in_turn(model, schemes, measure, seed=seed)
    skipped = f"{task.skipped} examples of the file are no pair of a right and a wrong text, and were left out."
    return MinimalPairsResult(
        model=type(unwrapped(model)).__name__,
        task=task.name,
        scoring="causal" if causal else "masked",
        pairs=len(pairs),
        of=len(task.pairs),
        seed=seed,
        rows=tuple(rows),
        notes=(skipped,) if task.skipped else (),
    )


def _chosen(pairs: Sequence[MinimalPair], samples: int | None, seed: int) -> list[MinimalPair]:
    if samples is None or samples >= len(pairs):
        return list(pairs)
    if samples < 1:
        raise MeasurementError(f"samples is {samples}; a measurement takes one pair at least.")
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:samples]
    return [pairs[index] for index in sorted(chosen)]


def _by_condition(pairs: Sequence[MinimalPair], scores: Tensor) -> tuple[ConditionAccuracy, ...]:
    right, tied = (scores[:, 0] > scores[:, 1]).tolist(), (scores[:, 0] == scores[:, 1]).tolist()
    groups: dict[str, list[int]] = {ALL: list(range(len(pairs)))}
    # Congruent and incongruent come before the conditions that they are made of.
    for depth in range(max(len(pair.conditions) for pair in pairs)):
        for index, pair in sorted(enumerate(pairs), key=lambda item: item[1].conditions):
            if depth < len(pair.conditions):
                groups.setdefault(pair.conditions[depth], []).append(index)
    return tuple(
        ConditionAccuracy(name, len(group), sum(right[index] for index in group), sum(tied[index] for index in group))
        for name, group in groups.items()
    )


def _check_vocabulary(model: Any, pairs: Sequence[TokenPair]) -> None:
    largest = max(max(tokens) for pair in pairs for tokens in pair)
    known = model.get_input_embeddings().weight.shape[0]
    if largest >= known:
        raise MeasurementError(
            f"The tokenizer gave the token id {largest}, but the model has {known} embeddings. Use the tokenizer that "
            f"belongs to this model."
        )
