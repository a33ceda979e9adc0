"""The table of swaps: a trained RoPE model gets another scheme, and some more training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from docs.generate.study_numbers import LENGTH, NOT_RUN, Run, Runs, finished, markdown, mean_of, ranged, shown, tail
from training.study.significance import Interval, mean_difference, paired

#: The two learning rates, in the labels of the study: 0.001 and 0.004.
SPEEDS = ("slow", "fast")


def heal_table(runs: Runs) -> str:
    """Losses after a swap, and after further training with each of two learning rates."""
    found = finished(runs, "reference_heal")
    if f"rope-{SPEEDS[0]}" not in found:
        return NOT_RUN
    rows = []
    for scheme in dict.fromkeys(label.rpartition("-")[0] for label in found if "-" in label):
        healed = {speed: found[f"{scheme}-{speed}"] for speed in SPEEDS}
        swapped = mean_of(_mean_loss(run["before"]) for run in healed[SPEEDS[0]].values())
        best = _best_speed(found, scheme)
        far = tail(best, 4 * LENGTH)
        above = above_control(found, scheme)
        losses = [mean_of(_mean_loss(run["by_length"]) for run in seeds.values()) for seeds in healed.values()]
        row = (f"`{scheme}`", shown(swapped), *map(shown, losses), ranged(above), shown(far), str(len(best)))
        rows.append((above.value, row))
    head = ("scheme", "after the swap", "healed at 0.001", "healed at 0.004", "above the control", "4 times", "seeds")
    return markdown(head, [row for _, row in sorted(rows)])


def above_control(found: Mapping[str, Mapping[int, Run]], scheme: str) -> Interval:
    """The loss after a swap to the scheme and healing, less that of a model that kept RoPE, each at its best rate."""
    own, control = (_best_speed(found, one) for one in (scheme, "rope"))
    losses = ({seed: _mean_loss(run["by_length"]) for seed, run in seeds.items()} for seeds in (own, control))
    return mean_difference(paired(*losses))


def _best_speed(found: Mapping[str, Mapping[int, Run]], scheme: str) -> Mapping[int, Run]:
    both = [found[f"{scheme}-{speed}"] for speed in SPEEDS]
    return min(both, key=lambda seeds: np.mean([_mean_loss(run["by_length"]) for run in seeds.values()]))


def _mean_loss(reading: Mapping[str, Any]) -> float:
    """The mean loss at the trained length."""
    return float(reading["loss"][reading["lengths"].index(LENGTH)])
