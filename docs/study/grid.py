"""The table of the grid: RoPE and the schemes that were close to it, each with the best of the same learning rates."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from docs.study.claims import LENGTH, LEVEL, MARGIN
from docs.study.significance import holm, mean_difference, p_equivalent, p_less, paired
from docs.study.table_numbers import NOT_RUN, Run, Runs, finished, markdown, mean_of, ranged, shown, tail_by_seed

SCHEMES = ("rope", "kerple", "forget_gate", "cope", "wavelet", "tisa", "tupe")
RATES = (1e-3, 2e-3, 4e-3)
SEEDS = range(5)
#: The study of each rate: `--output_dir outputs/reference_grid_1e-3`, packed as `runs/reference_grid_1e-3.parquet`.
STUDIES = {rate: f"reference_grid_{rate * 1000:g}e-3" for rate in RATES}


def grid_table(runs: Runs) -> str:
    """Each scheme with the rate that has the lowest validation loss, and its difference from RoPE.

    Nothing is shown before all training runs have ended, so that no choice depends on a part of them.
    """
    trained = {rate: finished(runs, study) for rate, study in STUDIES.items()}
    ended = [run for study in STUDIES.values() for run in runs.get(study, ())]
    if len(ended) < len(SCHEMES) * len(RATES) * len(SEEDS):
        return NOT_RUN
    losses = {scheme: {rate: _validation_loss(trained[rate].get(scheme, {})) for rate in RATES} for scheme in SCHEMES}
    best = {scheme: min(by_rate, key=lambda rate: by_rate[rate]) for scheme, by_rate in losses.items()}
    tails = {scheme: tail_by_seed(trained[best[scheme]][scheme], LENGTH) for scheme in SCHEMES}
    differences = {scheme: paired(tails[scheme], tails["rope"]) for scheme in SCHEMES[1:]}
    corrected = dict(zip(differences, holm([_p_unequal(each) for each in differences.values()]), strict=True))
    rows = []
    for scheme in sorted(SCHEMES, key=lambda scheme: mean_of(tails[scheme].values()).value):
        by_rate = [f"{loss:.3f}".replace("inf", "diverged") for loss in losses[scheme].values()]
        outside = " (at the edge)" if best[scheme] in (RATES[0], RATES[-1]) else ""
        cells = [*by_rate, f"{best[scheme]:g}{outside}", shown(mean_of(tails[scheme].values()))]
        if scheme in differences:
            verdict = _verdict(corrected[scheme], differences[scheme])
            cells += [ranged(mean_difference(differences[scheme])), f"{corrected[scheme]:.3f}", verdict]
        rows.append((f"`{scheme}`", *cells, *[""] * (8 - len(cells))))
    rates = (f"validation loss, {rate:g}" for rate in RATES)
    return markdown(("scheme", *rates, "best rate", "loss", "above RoPE", "p (Holm)", "verdict"), rows)


def _validation_loss(seeds: Mapping[int, Run]) -> float:
    """The mean over all seeds; infinite if a training diverged."""
    last = [run["curve"]["validation_loss"][-1] for run in seeds.values()]
    return float(np.mean(last)) if len(last) == len(SEEDS) else float("inf")


def _p_unequal(differences: np.ndarray) -> float:
    """The p-value of a two-sided paired t-test."""
    return min(1.0, 2 * min(p_less(differences), p_less(-differences)))


def _verdict(p_value: float, differences: np.ndarray) -> str:
    if p_value < LEVEL:
        return "lower" if differences.mean() < 0 else "higher"
    return "equal" if p_equivalent(differences, MARGIN) < LEVEL else "undecided"
