"""The tables of learning rates: which were tried, and what half of the chosen one changes."""

from __future__ import annotations

from collections.abc import Mapping

from docs.generate.study_numbers import (
    LENGTH,
    NOT_RUN,
    Runs,
    finished,
    markdown,
    mean_of,
    mean_paired,
    ranged,
    shown,
    tail_by_seed,
)
from training.study.rates import losses_by_rate


def rates_table(runs: Runs) -> str:
    """The validation losses that learning rates were chosen from."""
    losses: dict[tuple[str, str, str], dict[float, float]] = {}
    for study, found in runs.items():
        if study.endswith("_rates"):
            rate_of = {run["scheme"]: run["training"]["learning_rate"] for run in found}
            for (task, label), loss in losses_by_rate(found).items():
                place = study.removesuffix("_rates"), task, label.removesuffix(f"-{rate_of[label]:g}")
                losses.setdefault(place, {})[rate_of[label]] = loss
    if not losses:
        return NOT_RUN
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    rows = []
    for (study, task, scheme), by_rate in losses.items():
        best = min(by_rate, key=lambda rate: by_rate[rate])
        # An infinite loss is that of a training that diverged.
        cells = [f"{by_rate[rate]:.3f}".replace("inf", "diverged") if rate in by_rate else "" for rate in rates]
        name = study.removeprefix("reference").strip("_") or "main"
        name = {"tasks": task, "marian": f"{task} (Marian)"}.get(name, name)
        # Nothing is chosen before all rates were tried.
        tried = max(len(other) for (own, *_), other in losses.items() if own == study)
        rows.append((f"`{scheme}`", *cells, f"{best:g}" if len(by_rate) == tried else "", name))
    return markdown(("scheme", *(f"{rate:g}" for rate in rates), "chosen", "study or task"), rows)


def other_rate_table(runs: Runs) -> str:
    """Schemes with half of the chosen learning rate, beside the trainings of the main study with the chosen one."""
    found, rows = finished(runs, "reference"), []
    pairs = {
        scheme: [tail_by_seed(one, LENGTH) for one in (found.get(scheme, {}), seeds)]
        for scheme, seeds in finished(runs, "reference_half_rate").items()
    }
    better = {scheme: _better(*pair) for scheme, pair in pairs.items()}
    for scheme, (chosen, other) in pairs.items():
        common = sorted(chosen.keys() & other.keys())
        means = (shown(mean_of(one[seed] for seed in common)) for one in (chosen, other))
        difference = mean_paired(other, chosen)
        above = mean_paired(better[scheme], better.get("rope", {}))
        cells = (ranged(difference), "" if scheme == "rope" else ranged(above), str(len(common)))
        rows.append((mean_of(better[scheme].values()).value, (f"`{scheme}`", *means, *cells)))
    if not rows:
        return NOT_RUN
    head = ("scheme", "0.004, the chosen rate", "0.002", "difference", "above RoPE, better rates", "seeds")
    return markdown(head, [row for _, row in sorted(rows)])


def _better(chosen: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """Of two rates, the losses by seed with the one that has the lower mean over the common seeds."""
    common = sorted(chosen.keys() & other.keys())
    return min(({seed: one[seed] for seed in common} for one in (chosen, other)), key=lambda one: sum(one.values()))
