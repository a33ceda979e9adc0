"""Does a model hold the right text of a pair for the likelier one?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError, UnsupportedError
from hf_posenc.metrics.forward import check_vocabulary, predicts_next_token
from hf_posenc.metrics.in_turn import measure_in_turn
from hf_posenc.metrics.minimal_pairs.pairs import MinimalPair, MinimalPairsTask, read_minimal_pairs
from hf_posenc.metrics.minimal_pairs.scoring import causal_scores, encode_pairs, masked_scores
from hf_posenc.metrics.statistics import wilson_interval
from hf_posenc.patching.place.model_checks import unwrapped
from hf_posenc.preserve import evaluation_mode
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig

#: The condition that every pair has.
ALL = "all"


def minimal_pairs_accuracy(
    model: Any,
    tokenizer: Any,
    task: str | Path | MinimalPairsTask,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
) -> Result:
    """How often a language model gives the right text of a minimal pair the higher probability.

    A causal model scores a pair by its log-probabilities, a masked one by its pseudo-log-likelihood; see `scoring`.
    Which of the two a model is, is measured on it. The model is left as it was found, also after an error.

    Args:
        model: a causal or masked language model, patched or not.
        tokenizer: its tokenizer.
        task: the path of a BIG-bench file (see `read_minimal_pairs`), or what was read from one.
        schemes: what is measured, one after the other; see `measure_in_turn`.
        samples: score so many pairs, drawn without replacement; `None` scores all.
        seed: of that choice, which is the same for every scheme and model, and of new weights of a scheme.

    Returns:
        For each scheme and `condition` (`"all"` for every pair) the `accuracy` with its 95 % Wilson interval, and the
        number of `pairs` and of `ties`. A scheme that the architecture cannot take, or that cannot represent so long a
        text, has its reason in the `error` of its subject.

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
    pairs, of = list(task.pairs), len(task.pairs)
    if samples is not None and samples < of:
        if samples < 1:
            raise MeasurementError(f"samples is {samples}; a measurement takes one pair at least.")
        pairs = [pairs[index] for index in sorted(np.random.default_rng(seed).permutation(of)[:samples])]
    tokens = encode_pairs(tokenizer, [pair.texts for pair in pairs])
    check_vocabulary(model, *(max(side) for pair in tokens for side in pair))
    causal = predicts_next_token(model, torch.tensor([max((side for pair in tokens for side in pair), key=len)]))
    score = causal_scores if causal else masked_scores

    def measure(model: Any) -> list[Record]:
        with evaluation_mode(model):
            return _by_condition(pairs, score(model, tokenizer, tokens))

    subjects, records = measure_in_turn(model, schemes, measure, seed=seed)
    name, scoring = type(unwrapped(model)).__name__, "causal" if causal else "masked"
    chosen = f"{len(pairs)} of {of} pairs, seed {seed}" if len(pairs) < of else f"{of} pairs"
    skipped = f"{task.skipped} examples of the file are no pair of a right and a wrong text, and were left out."
    return Result(
        task="minimal_pairs",
        title=f"{name}, minimal pairs {task.name!r} ({scoring} scoring, {chosen})",
        quantities=(
            Quantity("pairs", "pairs", style="count"),
            Quantity("accuracy", "accuracy", "Chance is 0.5. Equally likely is not right.", style="fraction"),
            Quantity("ties", "ties", style="count"),
        ),
        subjects=subjects,
        records=records,
        views=(View(("pairs", "accuracy", "ties"), rows=("condition",)),),
        settings={
            "model": name,
            "task": task.name,
            "scoring": scoring,
            "pairs": len(pairs),
            "of": of,
            "seed": seed,
        },
        remarks=(skipped,) if task.skipped else (),
    )


def _by_condition(pairs: Sequence[MinimalPair], scores: Tensor) -> list[Record]:
    right, tied = (scores[:, 0] > scores[:, 1]).tolist(), (scores[:, 0] == scores[:, 1]).tolist()
    groups: dict[str, list[int]] = {ALL: list(range(len(pairs)))}
    # Congruent and incongruent come before the conditions that they are made of.
    named = [
        (depth, one.conditions, name, index)
        for index, one in enumerate(pairs)
        for depth, name in enumerate(one.conditions)
    ]
    for _, _, name, index in sorted(named):
        groups.setdefault(name, []).append(index)
    records = []
    for name, group in groups.items():
        count, at = len(group), {"condition": name}
        hits = sum(right[index] for index in group)
        low, high = wilson_interval(hits, count)
        records += [
            Record("", "pairs", count, at),
            Record("", "accuracy", hits / count, at, low, high, count),
            Record("", "ties", sum(tied[index] for index in group), at),
        ]
    return records
