"""The claims of docs/study/protocol.md, each with its test on the packed training runs of the study.

python docs/study/claims.py docs/study/runs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from docs.study.archive import study_in, trainings
from docs.study.significance import (
    Interval,
    difference_over_texts,
    holm,
    mean_difference,
    p_equivalent,
    p_less,
    paired,
)
from training.errors import SettingsError
from training.study.cells import DIVERGED, FINISHED

#: Level of a verdict, after Holm's correction over all tests.
LEVEL = 0.05
#: The largest difference, in nats per token, that counts as none.
MARGIN = 0.01
#: The loss, in nats per token, to which steps are counted.
REACHED = 1.70
#: The main study's trained length, and multiples of it.
LENGTH = 128
#: The longest text, in letters, that models are trained to copy.
COPIED = 10
#: Longer ones, up to twice that length.
BEYOND = (11, 12, 13, 14, 16, 20)
#: The share of right answers at the trained length from which on a scheme has learned to copy.
LEARNED = 0.5
#: Neighbouring windows that count as one text: 256 windows are from 12 documents.
NEIGHBOURS = 16

Run = Mapping[str, Any]
#: The training runs of each study by its name, as in `results.json`.
Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True)
class Measure:
    """A number of every seed of a scheme.

    Args:
        scheme: the label in the study.
        quantity: "tail_loss", the loss of the same last tokens; "accuracy", the share of right answers; or "steps", at
            which the curve falls below a loss, between two of its points.
        at: the length, or the loss; several lengths for the mean of their shares.
        study: the name of the study.
        task: of the study.
    """

    scheme: str
    quantity: str = "tail_loss"
    at: float | tuple[int, ...] = LENGTH
    study: str = "reference"
    task: str = "causal"

    def values(self, runs: Runs) -> dict[int, float]:
        """The number by seed, of the training runs that there are."""
        return {run["seed"]: self._value(run) for run in self._found(runs)}

    def by_text(self, runs: Runs) -> dict[int, list[float]]:
        """The loss of each text by seed; empty for other quantities, and without a training that diverged."""
        if self.quantity != "tail_loss":
            return {}
        readings = {run["seed"]: run["by_length"] for run in self._found(runs) if run["status"] == FINISHED}
        return {
            seed: reading["window_tail_loss"][reading["lengths"].index(self.at)] for seed, reading in readings.items()
        }

    def _found(self, runs: Runs) -> list[Run]:
        return [
            run
            for run in runs.get(self.study, ())
            if (run["task"], run["scheme"]) == (self.task, self.scheme) and run["status"] in (FINISHED, DIVERGED)
        ]

    def _value(self, run: Run) -> float:
        if run["status"] == DIVERGED:
            # As good as a model that knows token frequencies, or no answer.
            lost = {"tail_loss": run["token_frequencies"], "accuracy": 0.0, "steps": run["max_steps"]}
            return float(lost[self.quantity])
        if self.quantity == "steps":
            steps, losses = run["curve"]["step"], run["curve"]["validation_loss"]
            after = next((index for index, loss in enumerate(losses) if loss < self.at), None)
            if after is None or after == 0:
                # Where the loss is never reached, the number is a lower bound.
                return float(steps[-1] if after is None else steps[0])
            share = (losses[after - 1] - self.at) / (losses[after - 1] - losses[after])
            return float(steps[after - 1] + share * (steps[after] - steps[after - 1]))
        if self.quantity == "accuracy":
            reading = run["exact_match"]
            lengths = self.at if isinstance(self.at, tuple) else (self.at,)
            return float(np.mean([reading["accuracy"][reading["lengths"].index(length)] for length in lengths]))
        return tail_loss(run, self.at)


def tail_loss(run: Run, length: float | tuple[int, ...]) -> float:
    """The loss of the same last tokens of every text, read at a length."""
    reading = run["by_length"]
    place = reading["lengths"].index(length)
    by_text = reading["window_tail_loss"][place]
    # Texts of a masked model have different numbers of masked tokens, some of them none. Otherwise, the mean over texts
    # has more digits than the loss that is stored beside it.
    return float(reading["tail_loss"][place] if None in by_text else np.mean(by_text))


@dataclass(frozen=True)
class Condition:
    """What a test takes for granted: that the mean of a number over seeds has a least value.

    Args:
        measure: the number.
        at_least: the least value of its mean.
    """

    measure: Measure
    at_least: float

    def holds(self, runs: Runs) -> bool:
        """Whether it holds for the training runs that there are."""
        values = list(self.measure.values(runs).values())
        return bool(values) and float(np.mean(values)) >= self.at_least


@dataclass(frozen=True)
class Comparison:
    """One test: that the first measure is below the second, or with a margin, that both are the same.

    Args:
        first: what is compared.
        second: with what.
        margin: of an equivalence; `None` for "less".
        conditions: without which the test says nothing.
    """

    first: Measure
    second: Measure
    margin: float | None = None
    conditions: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        same = self.first.scheme == self.second.scheme
        names = [f"{measure.scheme}{f' at {measure.at}' if same else ''}" for measure in (self.first, self.second)]
        return f"{names[0]} {'<' if self.margin is None else '='} {names[1]}"

    def differences(self, runs: Runs) -> list[float]:
        """First less second by seed; empty for fewer than two common seeds."""
        try:
            return [float(difference) for difference in paired(self.first.values(runs), self.second.values(runs))]
        except SettingsError:
            return []

    def p_values(self, differences: Sequence[float]) -> tuple[float, float]:
        """The p-values of the claim and of its opposite."""
        values = np.asarray(differences)
        if self.margin is None:
            return p_less(values), p_less(-values)
        # A difference beyond the margin may lie on either side.
        outside = min(p_less(self.margin - values), p_less(self.margin + values))
        return p_equivalent(values, self.margin), min(1.0, 2 * outside)


@dataclass(frozen=True)
class Claim:
    """A sentence of the literature and its tests, all of which have to hold.

    Args:
        number: in the protocol.
        text: the sentence.
        source: where it is from.
        tests: what would show it here.
    """

    number: str
    text: str
    source: str
    tests: tuple[Comparison, ...]


@dataclass(frozen=True)
class Outcome:
    """What a test showed.

    Args:
        claim: its claim.
        test: the test.
        seeds: how many pairs there are; with fewer than two, there is nothing else.
        difference: the mean with Student's interval over seeds.
        over_texts: the same with an interval over seeds and texts, for losses.
        p: after Holm's correction over all tests of all claims.
        p_opposite: of the opposite, likewise.
        decidable: whether the conditions of the test hold.
    """

    claim: Claim
    test: Comparison
    seeds: int
    difference: Interval | None
    over_texts: Interval | None
    p: float
    p_opposite: float
    decidable: bool

    @property
    def verdict(self) -> str:
        """One of "confirmed", "contradicted", "undecided", "not decidable" and "not run"."""
        if self.difference is None:
            return "not run"
        if not self.decidable:
            return "not decidable"
        if self.p < LEVEL:
            return "confirmed"
        return "contradicted" if self.p_opposite < LEVEL else "undecided"

    @property
    def decisive_p(self) -> float:
        """The p-value that the verdict follows from, or the smaller one where nothing is decided."""
        return min(self.p, self.p_opposite)


def verdict_of(outcomes_of_claim: Sequence[Outcome]) -> str:
    """The verdict of a claim: "confirmed" if all its tests are, "contradicted" if any is."""
    verdicts = [outcome.verdict for outcome in outcomes_of_claim]
    if "contradicted" in verdicts:
        return "contradicted"
    return next((outcome for outcome in ("undecided", "not decidable", "not run") if outcome in verdicts), "confirmed")


def _flat(scheme: str) -> Comparison:
    return Comparison(Measure(scheme, at=8 * LENGTH), Measure(scheme), MARGIN)


def _stretched(scheme: str) -> Measure:
    return Measure(scheme, at=4 * LENGTH)


def _steps(scheme: str) -> Measure:
    return Measure(scheme, "steps", REACHED)


def _copied(scheme: str, letters: int | tuple[int, ...] = BEYOND) -> Measure:
    return Measure(scheme, "accuracy", letters, "reference_tasks", "copy")


def _has_learned(scheme: str) -> Condition:
    return Condition(_copied(scheme, COPIED), LEARNED)


CLAIMS = (
    Claim(
        "1a",
        "KERPLE has a lower loss than ALiBi at the trained length",
        "arXiv:2205.09921",
        (Comparison(Measure("kerple"), Measure("alibi")),),
    ),
    Claim(
        "1b",
        "FoX has a lower loss than RoPE at the trained length",
        "arXiv:2503.02130",
        (Comparison(Measure("forget_gate"), Measure("rope")),),
    ),
    Claim(
        "2",
        "ALiBi, KERPLE and FoX are flat up to 8 times the trained length",
        "arXiv:2108.12409, 2205.09921, 2503.02130",
        (_flat("alibi"), _flat("kerple"), _flat("forget_gate")),
    ),
    Claim(
        "3",
        "at 4 times the trained length, without training: YaRN < NTK < no scaling < PI",
        "arXiv:2309.00071; the last step is our own",
        tuple(
            Comparison(_stretched(first), _stretched(second))
            for first, second in (("yarn", "ntk"), ("ntk", "rope"), ("rope", "pi"))
        ),
    ),
    Claim(
        "4",
        f"trained on up to {COPIED} letters, a model copies longer texts better without positions than with any of six "
        "schemes",
        "arXiv:2305.19466",
        tuple(
            Comparison(_copied(other), _copied("none"), conditions=(_has_learned(other), _has_learned("none")))
            for other in ("sinusoidal", "learned", "t5", "alibi", "rope", "forget_gate")
        ),
    ),
    Claim(
        "5",
        "p-RoPE has the loss of RoPE at the trained length",
        "arXiv:2410.06205 claims a lower one, which is undecided at this length",
        (Comparison(Measure("p_rope"), Measure("rope"), MARGIN),),
    ),
    Claim(
        "6",
        f"RoPE reaches {REACHED:.2f} nats in fewer steps than learned and sinusoidal positions",
        "arXiv:2104.09864",
        (Comparison(_steps("rope"), _steps("learned")), Comparison(_steps("rope"), _steps("sinusoidal"))),
    ),
)


def outcomes(runs: Runs) -> list[Outcome]:
    """The outcome of every test, in the order of the claims.

    A test that was not run, or is not decidable, takes part in Holm's correction with a p-value of 1, so that results
    cannot become more certain because others are missing.
    """
    tests = [(claim, test, test.differences(runs)) for claim in CLAIMS for test in claim.tests]
    decidable = [all(condition.holds(runs) for condition in test.conditions) for _, test, _ in tests]
    pairs = [
        test.p_values(differences) if differences and decided else (1.0, 1.0)
        for (_, test, differences), decided in zip(tests, decidable, strict=True)
    ]
    adjusted = zip(holm([p for p, _ in pairs]), holm([p for _, p in pairs]), strict=True)
    return [
        Outcome(
            claim,
            test,
            len(differences),
            mean_difference(differences) if differences else None,
            over_texts(test.first, test.second, runs),
            p,
            p_opposite,
            decided,
        )
        for (claim, test, differences), (p, p_opposite), decided in zip(tests, adjusted, decidable, strict=True)
    ]


def over_texts(first: Measure, second: Measure, runs: Runs) -> Interval | None:
    """The mean of first less second with an interval over seeds and texts; `None` for fewer than two common seeds."""
    by_text = first.by_text(runs), second.by_text(runs)
    seeds = sorted(by_text[0].keys() & by_text[1].keys())
    if len(seeds) < 2:
        return None
    pairs = ([losses[seed] for seed in seeds] for losses in by_text)
    return difference_over_texts(*pairs, neighbours=NEIGHBOURS)


def read_runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The training runs of every archive in a folder, by the name of its file.

    One that diverged also has the loss of a model that knows token frequencies, as `token_frequencies`.

    Raises:
        SettingsError: if there is none.
    """
    runs = {file.stem: list(_results(file)) for file in sorted(folder.glob("*.parquet"))}
    if not runs:
        raise SettingsError(f"{folder} has no archive of a study (*.parquet); see docs/study/archive.py.")
    return runs


def _results(file: Path) -> Iterator[dict[str, Any]]:
    for training in trainings(file):
        result = training.result
        if result["status"] == DIVERGED:
            task = study_in(file)["tasks"][result["task"]]
            result |= {
                "token_frequencies": task.get("unigram_cross_entropy"),
                "max_steps": training.settings["max_steps"],
            }
        yield result


def main(arguments: list[str] | None = None) -> int:
    """Prints the outcome of every test. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the archives")
    try:
        runs = read_runs(parser.parse_args(arguments).folder)
    except SettingsError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    for outcome in outcomes(runs):
        numbers = (
            ""
            if outcome.difference is None
            else f"{outcome.difference}, p = {outcome.decisive_p:.2g}, {outcome.seeds} seeds"
        )
        print(f"{outcome.claim.number:3} {outcome.test!s:36} {outcome.verdict:13} {numbers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
