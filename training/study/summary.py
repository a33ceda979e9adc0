"""Findings in words, computed from the figures: for the top of the report and for those who cannot see a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_posenc.plots.curves import Curve
from training.study.aggregation import Aggregate, Estimate
from training.study.schema import GENERALIZATION
from training.study.tables import number

#: Nats per token; a model that is less than this below the level of token frequencies has learned little.
LITTLE = 0.2
#: Nats per token; a scheme whose loss rises by less than this from the trained length to the longest counts as flat.
FLAT = 0.05


def curve_summary(curves: Sequence[Curve], x_name: str) -> str:
    """Every line by its first and last value, the lowest end first."""
    parts = []
    for curve in sorted(curves, key=lambda curve: _ends(curve)[1][1]):
        first, last = _ends(curve)
        if first == last:
            parts.append(f"{curve.label} {last[1]:.3g} at {x_name} {last[0]:g}")
        else:
            parts.append(f"{curve.label} from {first[1]:.3g} at {x_name} {first[0]:g} to {last[1]:.3g} at {last[0]:g}")
    return f"Line chart of {len(curves)} scheme{'s' if len(curves) != 1 else ''}: {'; '.join(parts)}."


def share_summary(aggregates: Sequence[Aggregate], task: dict[str, Any]) -> str:
    """Every scheme by its exact match at the longest trained and at the longest tested length."""
    lengths = task["lengths"]
    place = _last_trained(task)
    parts = []
    for item in aggregates:
        cells = [f"{number(item.accuracy[-1], 0, 100)} percent at length {lengths[-1]}"]
        if place is not None and place != len(lengths) - 1:
            cells.insert(0, f"{number(item.accuracy[place], 0, 100)} percent at {lengths[place]}")
        parts.append(f"{item.scheme} {' and '.join(cells)}")
    return f"Heat map of exact match by scheme and length: {'; '.join(parts)}."


def sliding_summary(aggregates: Sequence[Aggregate], length: int) -> str:
    """Every scheme by its loss with the whole context and with the window."""
    parts = [
        f"{item.scheme} {number(item.loss[-1])} with the whole context and {number(item.sliding_loss)} with the window"
        for item in aggregates
    ]
    return f"Loss at {length} tokens: {'; '.join(parts)}."


def price_summary(aggregates: Sequence[Aggregate]) -> str:
    """Every scheme by its ratio."""
    parts = [f"{item.scheme} {number(item.price, 2)}" for item in aggregates]
    first = aggregates[0]
    return f"{first.clock.capitalize()} time per step relative to {first.price_reference}: {'; '.join(parts)}."


def task_findings(task: dict[str, Any], aggregates: Sequence[Aggregate]) -> list[str]:
    """A few sentences on a task; none if nothing finished."""
    finished = [item for item in aggregates if item.n]
    if not finished:
        return []
    return _generalization(task, finished) if task["kind"] == GENERALIZATION else _language_modeling(task, finished)


def _language_modeling(task: dict[str, Any], finished: Sequence[Aggregate]) -> list[str]:
    lengths = task["lengths"]
    places = [0] if len(lengths) == 1 else [0, len(lengths) - 1]
    findings = []
    for place in places:
        ranked = sorted((item for item in finished if item.loss[place].mean is not None), key=lambda i: _mean(i, place))
        if ranked:
            findings.append(f"Lowest loss at {lengths[place]} tokens: {_leaders(ranked, place)}.")
    little = [
        item.scheme
        for item in finished
        if item.loss[0].mean is not None and _mean(item, 0) > task["unigram_cross_entropy"] - LITTLE
    ]
    if little:
        findings.append(
            f"Within {LITTLE} nats of what token frequencies alone give ({task['unigram_cross_entropy']:.2f}), or "
            f"worse, so hardly anything was learned (left out below): {', '.join(little)}."
        )
    if len(lengths) == 1:
        return findings
    rises = {
        item.scheme: _mean(item, -1) - _mean(item, 0)
        for item in finished
        if item.loss[0].mean is not None and item.loss[-1].mean is not None and item.scheme not in little
    }
    flat = [name for name, rise in rises.items() if rise < FLAT]
    steep = sorted((name for name in rises if name not in flat), key=lambda name: rises[name])
    if flat:
        findings.append(
            f"Loss at {lengths[-1]} tokens less than {FLAT} nats above that at {lengths[0]}: {', '.join(flat)}."
        )
    if steep:
        listed = ", ".join(f"{name} (+{rises[name]:.2f})" for name in steep)
        findings.append(f"Loss rises from {lengths[0]} to {lengths[-1]} tokens, in nats: {listed}.")
    return findings


def _generalization(task: dict[str, Any], finished: Sequence[Aggregate]) -> list[str]:
    longest = max(task["train_lengths"])
    place = _last_trained(task)
    findings = []
    if place is not None:
        learned = [item.scheme for item in finished if (item.accuracy[place].mean or 0.0) >= 0.9]
        others = [
            f"{item.scheme} ({number(item.accuracy[place], 0, 100)} %)"
            for item in finished
            if item.scheme not in learned
        ]
        at = f"at length {task['lengths'][place]}, which training had"
        findings += [f"Learned the task ({at}; 90 % or more exact): {', '.join(learned)}."] if learned else []
        findings += [f"Did not learn it in this budget ({at}): {', '.join(others)}."] if others else []
    beyond = [index for index, length in enumerate(task["lengths"]) if length > longest]
    if beyond:
        means = {
            item.scheme: sum(item.accuracy[index].mean or 0.0 for index in beyond) / len(beyond) for item in finished
        }
        ranked = sorted(means, key=lambda name: -means[name])
        listed = ", ".join(f"{name} {100 * means[name]:.0f} %" for name in ranked)
        findings.append(f"Mean exact match at lengths beyond {longest}: {listed}.")
    return findings


def _leaders(ranked: Sequence[Aggregate], place: int) -> str:
    """The best, and those whose interval touches that of the best."""
    best = ranked[0]
    text = f"{best.scheme} {number(best.loss[place])}"
    if best.loss[place].half_width is None:
        others = [f"{item.scheme} {number(item.loss[place])}" for item in ranked[1:3]]
        return f"{text}{', then ' + ', '.join(others) if others else ''} (one seed, which ranks no neighbours)"
    close = [item.scheme for item in ranked[1:] if _touch(best.loss[place], item.loss[place])]
    return (
        f"{text}; its interval touches that of {', '.join(close)}" if close else f"{text}; no other interval touches it"
    )


def _touch(first: Estimate, second: Estimate) -> bool:
    if first.mean is None or second.mean is None:
        return False
    return abs(first.mean - second.mean) <= (first.half_width or 0.0) + (second.half_width or 0.0)


def _mean(item: Aggregate, place: int) -> float:
    mean = item.loss[place].mean
    assert mean is not None
    return mean


def _last_trained(task: dict[str, Any]) -> int | None:
    within = [index for index, length in enumerate(task["lengths"]) if length <= max(task["train_lengths"])]
    return within[-1] if within else None


def _ends(curve: Curve) -> tuple[tuple[float, float], tuple[float, float]]:
    points = [(x, mean) for x, mean in zip(curve.x, curve.mean, strict=True) if mean is not None]
    return points[0], points[-1]
