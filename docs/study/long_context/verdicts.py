"""What the study of longer texts measured, and the verdicts on its claims (protocol.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from docs.study.long_context.material import (
    BEFORE,
    HAYSTACKS,
    METHODS,
    NEEDLE_LENGTHS,
    PASSKEY_DEPTHS,
    PASSKEY_LENGTH,
    TARGETS,
    text_files,
)
from docs.study.significance import Interval, holm, mean_difference, p_equivalent, p_less
from training.errors import SettingsError

#: Of claim A, in nats.
MARGIN = 0.02
LEVEL = 0.05
#: What `extend_context` does not offer.
_NOT_OFFERED = ("native", "p_rope", "sinks")
_GO_ON = (
    "The protocol makes no table of a part of the results: run docs/study/long_context/run.py until it has nothing "
    "left, then its part `pack`."
)
_SHORT, _CUT, _LONG = BEFORE[0], BEFORE[1], BEFORE[-1]

#: Losses of all texts in one order, by method and number of tokens before the targets.
Losses = Mapping[tuple[str, int], NDArray[np.float64]]


@dataclass(frozen=True)
class Verdict:
    """The result of a claim about a method.

    Args:
        difference: the mean difference in nats, with its interval.
        p_value: after Holm's correction; `None` if there was nothing to test.
        passed: whether the claim is confirmed.
    """

    difference: Interval
    p_value: float | None
    passed: bool


def losses_of(rows: Iterable[Mapping[str, Any]]) -> Losses:
    """The losses by method and length.

    Raises:
        SettingsError: if one is missing.
    """
    known = {(row["method"], row["before"], row["text"]): row["loss"] for row in rows if row["part"] == "losses"}
    missing, losses = [], {}
    for method, how in METHODS.items():
        for before in BEFORE:
            measured = method if how.same_up_to < before + TARGETS else "native"
            names = [(measured, before, text) for text in text_files()]
            missing += [name for name in names if name not in known]
            losses[method, before] = np.array([known.get(name, np.nan) for name in names])
    if missing:
        raise SettingsError(f"{len(set(missing))} losses are missing, such as {missing[0]}. {_GO_ON}")
    return losses


def verdicts(losses: Losses) -> dict[tuple[str, str], Verdict]:
    """The verdict on each claim (A, B, C) about each method but the native one."""
    compared = {
        "A": (_SHORT, losses["native", _SHORT]),
        "B": (_LONG, losses["native", _LONG]),
        "C": (_LONG, losses["native", _CUT]),
    }
    differences = {
        (claim, method): losses[method, length] - baseline
        for method in METHODS
        if method != "native"
        for claim, (length, baseline) in compared.items()
    }
    by_definition = {("A", name) for name, how in METHODS.items() if how.same_up_to >= _SHORT + TARGETS}
    tested = [name for name in differences if name not in by_definition]
    values = [
        p_equivalent(differences[name], MARGIN) if name[0] == "A" else p_less(differences[name]) for name in tested
    ]
    corrected = dict(zip(tested, holm(values), strict=True))
    return {
        name: Verdict(
            mean_difference(difference),
            corrected.get(name),
            name in by_definition or corrected[name] < LEVEL,
        )
        for name, difference in differences.items()
    }


def check_other_parts(losses: Losses, rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuses results in which facts, passkeys or prices are missing.

    Raises:
        SettingsError: naming one that is missing.
    """
    known = {(row["part"], row["method"], row["before"], row["text"]) for row in rows}
    others = [method for method in METHODS if method != "native"]
    best = sorted(others, key=lambda method: losses[method, _LONG].mean())[:3]
    wanted = [
        ("needles", method, length, str(seed))
        for method in ("native", *best)
        for length in NEEDLE_LENGTHS
        for seed in HAYSTACKS
    ]
    for method in METHODS:
        wanted += [("needles", method, max(NEEDLE_LENGTHS), "0"), ("price", method, _LONG, next(iter(text_files())))]
        wanted += [("passkey", method, PASSKEY_LENGTH, str(depth)) for depth in PASSKEY_DEPTHS]
    missing = [name for name in wanted if name not in known]
    if missing:
        raise SettingsError(
            f"{len(set(missing))} facts, passkeys or prices are missing, such as {missing[0]}. {_GO_ON}"
        )


def recommended(losses: Losses, rows: Iterable[Mapping[str, Any]], claims: str = "ABC") -> list[str]:
    """The methods for which some claims hold, in the order of the protocol's rule: it chooses one, then of the rest."""
    found, rows = verdicts(losses), list(rows)
    facts = {
        row["method"]: sum(row["right"])
        for row in rows
        if (row["part"], row["before"], row["text"]) == ("needles", max(NEEDLE_LENGTHS), "0")
    }
    seconds = {row["method"]: row["on_clock"] for row in rows if row["part"] == "price"}
    left = {
        method: losses[method, _LONG]
        for method in METHODS
        if method not in _NOT_OFFERED and all(found[claim, method].passed for claim in claims)
    }
    ranked = []
    while left:
        lowest = min(left, key=lambda method: left[method].mean())
        close = [name for name in left if name == lowest or mean_difference(left[name] - left[lowest]).low <= 0]
        ranked.append(max(close, key=lambda method: (facts[method], -seconds[method])))
        del left[ranked[-1]]
    return ranked
