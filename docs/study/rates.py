"""The tables of learning rates: which were tried, and what half of the chosen one changes."""

from __future__ import annotations

from collections.abc import Mapping

from docs.study.table_numbers import (
    LENGTH,
    Run,
    Runs,
    finished,
    markdown,
    mean_of,
    mean_paired,
    processors,
    ranged,
    ranked,
    shown,
    tail_by_seed,
)
from training.study.rates import losses_by_rate


def rates_table(runs: Runs) -> str:
    """The validation losses that learning rates were chosen from."""
    losses: dict[tuple[str, str, str], dict[float, float]] = {}
    for study, trainings in runs.items():
        if study.endswith("_rates"):
            rate_of = {run["scheme"]: run["training"]["learning_rate"] for run in trainings}
            for (task, label), loss in losses_by_rate(trainings).items():
                place = study.removesuffix("_rates"), task, label.removesuffix(f"-{rate_of[label]:g}")
                losses.setdefault(place, {})[rate_of[label]] = loss
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    rows = []
    for (study, task, scheme), by_rate in losses.items():
        best = min(by_rate, key=lambda rate: by_rate[rate])
        # An infinite loss is that of a training that diverged.
        cells = [f"{by_rate[rate]:.3f}".replace("inf", "diverged") if rate in by_rate else "" for rate in rates]
        name = study.removeprefix("reference").strip("_") or "main"
        name = {"tasks": task, "marian": f"{task} (Marian)"}.get(name, name)
        # Nothing is chosen before all rates were tried.
        tried = max(len(other) for (of_study, *_), other in losses.items() if of_study == study)
        rows.append((f"`{scheme}`", *cells, f"{best:g}" if len(by_rate) == tried else "", name))
    return markdown(("scheme", *(f"{rate:g}" for rate in rates), "chosen", "study or task"), rows)


def other_rate_table(runs: Runs) -> str:
    """Schemes with half of the chosen learning rate, beside the training runs of the main study with the chosen one."""
    trained, above, rows = finished(runs, "reference"), above_rope_at_better_rates(runs), []
    for scheme, seeds in finished(runs, "reference_half_rate").items():
        chosen, other = (tail_by_seed(by_seed, LENGTH) for by_seed in (trained.get(scheme, {}), seeds))
        common = sorted(chosen.keys() & other.keys())
        means = [mean_of(by_seed[seed] for seed in common) for by_seed in (chosen, other)]
        cells = (*map(shown, means), ranged(mean_paired(other, chosen)), above.get(scheme, ""), str(len(common)))
        rows.append((min(mean.value for mean in means), (f"`{scheme}`", *cells)))
    head = ("scheme", "0.004, the chosen rate", "0.002", "difference", "above RoPE, better rates", "seeds")
    return ranked(head, rows)


def above_rope_at_better_rates(runs: Runs) -> dict[str, str]:
    """The loss of each scheme less that of RoPE, each with the rate of the two that has the lower mean.

    A difference between training runs of two processors says so: other rounding alone moves a loss.
    """
    trained = finished(runs, "reference")
    better = {
        scheme: _better(trained.get(scheme, {}), seeds)
        for scheme, seeds in finished(runs, "reference_half_rate").items()
    }
    rope, shares = better.pop("rope", {}), {}
    for scheme, seeds in better.items():
        above = ranged(mean_paired(tail_by_seed(seeds, LENGTH), tail_by_seed(rope, LENGTH)))
        shares[scheme] = f"{above} (two processors)" if above and processors(seeds) != processors(rope) else above
    return shares


def _better(chosen: Mapping[int, Run], other: Mapping[int, Run]) -> dict[int, Run]:
    """Of two rates, the training runs by seed with the one that has the lower mean over the common seeds."""
    common = sorted(chosen.keys() & other.keys())
    return min(
        ({seed: by_seed[seed] for seed in common} for by_seed in (chosen, other)),
        key=lambda by_seed: sum(tail_by_seed(by_seed, LENGTH).values()),
    )
