"""The tables of swaps: a trained RoPE model gets another scheme, and some more training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from docs.study.significance import Interval
from docs.study.table_numbers import (
    LENGTH,
    NOT_RUN,
    Run,
    Runs,
    finished,
    mean_of,
    mean_paired,
    ranged,
    ranked,
    seeds_of,
    shown,
    tail,
)

#: The two learning rates, in the labels of the study: 0.001 and 0.004.
SPEEDS = ("slow", "fast")
#: The tokens that SmolLM2 is healed on at a time, and four times as many.
_PRETRAINED_LENGTHS = (256, 1024)


def heal_table(runs: Runs) -> str:
    """Losses after a swap, and after further training with each of two learning rates."""
    trained = finished(runs, "reference_heal")
    schemes = list(dict.fromkeys(label.rpartition("-")[0] for label in trained if "-" in label))
    if "rope" not in schemes:
        return NOT_RUN
    rows = []
    for scheme in schemes:
        healed = {speed: trained.get(f"{scheme}-{speed}", {}) for speed in SPEEDS}
        first = next(seeds for seeds in healed.values() if seeds)
        best, above = best_speed(trained, scheme), above_control(trained, scheme)
        swapped = mean_of(_mean_loss(run["before"]) for run in first.values())
        losses = [mean_of(_mean_loss(run["by_length"]) for run in seeds.values()) for seeds in healed.values()]
        far = shown(tail(best, 4 * LENGTH))
        row = (f"`{scheme}`", shown(swapped), *map(shown, losses), ranged(above), far, str(len(best)))
        rows.append((above.value, row))
    head = ("scheme", "after the swap", "healed at 0.001", "healed at 0.004", "above the control", "4 times", "seeds")
    return ranked(head, rows)


def pretrained_heal_table(runs: Runs) -> str:
    """Losses of a pretrained model after a swap, and after further training."""
    trained = finished(runs, "reference_heal_smollm2")
    length, longest = _PRETRAINED_LENGTHS
    control = {seed: _mean_loss(run["by_length"], length) for seed, run in trained.get("native", {}).items()}
    rows = []
    for scheme, seeds in trained.items():
        before, after = (
            {seed: _mean_loss(run[name], length) for seed, run in seeds.items()} for name in ("before", "by_length")
        )
        above = mean_paired(after, control)
        losses = (shown(mean_of(by_seed.values())) for by_seed in (before, after))
        tails = (shown(tail(seeds, at)) for at in (length, longest))
        number = seeds_of(runs, "reference_heal_smollm2", scheme)
        rows.append((mean_of(after.values()).value, (f"`{scheme}`", *losses, ranged(above), *tails, number)))
    tails_of = f"last 32 of {length}", f"of {longest:,}"
    head = ("scheme", "after the swap", "healed", "above the control", *tails_of, "seeds")
    return ranked(head, rows)


def above_control(trained: Mapping[str, Mapping[int, Run]], scheme: str) -> Interval:
    """The loss after a swap to the scheme and healing, less that of a model that kept RoPE, each at its best rate.

    Not a number if one of the two was not run.
    """
    healed, control = (
        {seed: _mean_loss(run["by_length"]) for seed, run in best_speed(trained, label).items()}
        for label in (scheme, "rope")
    )
    return mean_paired(healed, control)


def best_speed(trained: Mapping[str, Mapping[int, Run]], scheme: str) -> Mapping[int, Run]:
    """The training runs with the rate that has more of them, and the lower mean loss."""
    speeds = [trained.get(f"{scheme}-{speed}", {}) for speed in SPEEDS]
    return min(
        speeds,
        key=lambda seeds: (-len(seeds), np.mean([_mean_loss(run["by_length"]) for run in seeds.values()] or [np.inf])),
    )


def _mean_loss(reading: Mapping[str, Any], length: int = LENGTH) -> float:
    """The mean loss at a length, by default the trained one of the study."""
    return float(reading["loss"][reading["lengths"].index(length)])
