"""What was seen in a task, in a few sentences that are computed from its records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hf_posenc.report import Record, Result
from training.study.results import Task

#: Nats per token; a model that is less than this below the level of token frequencies has learned little.
LITTLE = 0.2
#: Nats per token; a scheme whose loss rises by less than this from the trained length to the longest counts as flat.
FLAT = 0.05


def task_findings(task: Task, result: Result) -> list[str]:
    """A few sentences on a task; none if nothing finished."""
    say: Callable[[Task, Result], list[str]] = {
        "language_modeling": _language_modeling, "generalization": _generalization
    }.get(task.kind, lambda task, result: [])  # fmt: skip
    return say(task, result) if any(record.quantity == "seeds" and record.value for record in result.records) else []


def _at(result: Result, quantity: str, length: int) -> list[Record]:
    return [record for record in result.of(quantity=quantity, length=length) if record.value is not None]


def _language_modeling(task: Task, result: Result) -> list[str]:
    ends = list(dict.fromkeys((task.lengths[0], task.lengths[-1])))
    losses = {length: {record.subject: record for record in _at(result, "loss", length)} for length in ends}
    findings = [
        f"Lowest loss at {length} tokens: {_leaders(sorted(found.values(), key=lambda record: record.value or 0.0))}."
        for length, found in losses.items()
        if found
    ]
    first, last = losses[ends[0]], losses[ends[-1]]
    frequencies = math.inf if task.unigram_cross_entropy is None else task.unigram_cross_entropy
    little = [label for label, record in first.items() if (record.value or 0.0) > frequencies - LITTLE]
    if little:
        findings.append(
            f"Within {LITTLE} nats of what token frequencies alone give ({frequencies:.2f}), or worse, so hardly "
            f"anything was learned (left out below): {', '.join(little)}."
        )
    if len(ends) == 1:
        return findings
    rises = {
        label: (last[label].value or 0.0) - (first[label].value or 0.0)
        for label in first
        if label in last and label not in little
    }
    flat = [label for label, rise in rises.items() if rise < FLAT]
    steep = sorted((label for label in rises if label not in flat), key=lambda label: rises[label])
    if flat:
        findings.append(f"Loss at {ends[-1]} tokens less than {FLAT} nats above that at {ends[0]}: {', '.join(flat)}.")
    if steep:
        listed = ", ".join(f"{label} (+{rises[label]:.2f})" for label in steep)
        findings.append(f"Loss rises from {ends[0]} to {ends[-1]} tokens, in nats: {listed}.")
    return findings


def _leaders(ranked: Sequence[Record]) -> str:
    """The best, and those whose interval touches that of the best."""
    best = ranked[0]
    if best.low is None or best.high is None:
        others = ", ".join(f"{record.subject} {record.value:.3f}" for record in ranked[1:3])
        then = f", then {others}" if others else ""
        return f"{best.subject} {best.value:.3f}{then} (one seed, which does not rank neighbours)"
    text = f"{best.subject} {best.value:.3f} ± {(best.high - best.low) / 2:.3f}"
    close = [record.subject for record in ranked[1:] if _end(record) <= best.high]
    return f"{text}; its interval touches that of {', '.join(close)}" if close else f"{text}; no other interval does"


def _end(record: Record) -> float:
    return (record.value if record.low is None else record.low) or 0.0


def _generalization(task: Task, result: Result) -> list[str]:
    longest = max(task.train_lengths)
    within = [length for length in task.lengths if length <= longest]
    findings = []
    if within:
        shares = {record.subject: record.value or 0.0 for record in _at(result, "accuracy", within[-1])}
        learned = [label for label, share in shares.items() if share >= 0.9]
        others = [f"{label} ({100 * share:.0f} %)" for label, share in shares.items() if label not in learned]
        at = f"at length {within[-1]}, which training had"
        findings += [f"Learned the task ({at}; 90 % or more exact): {', '.join(learned)}."] if learned else []
        findings += [f"Did not learn it in this budget ({at}): {', '.join(others)}."] if others else []
    beyond: dict[str, list[float]] = {}
    for length in (length for length in task.lengths if length > longest):
        for record in _at(result, "accuracy", length):
            beyond.setdefault(record.subject, []).append(record.value or 0.0)
    if beyond:
        means = {label: sum(found) / len(found) for label, found in beyond.items()}
        listed = ", ".join(
            f"{label} {100 * means[label]:.0f} %" for label in sorted(means, key=lambda name: -means[name])
        )
        findings.append(f"Mean exact match at lengths beyond {longest}: {listed}.")
    return findings
