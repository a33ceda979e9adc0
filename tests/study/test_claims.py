"""The claims of the protocol, on invented runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.study import archive, claims
from docs.study.claims import CLAIMS, LENGTH, Outcome, outcomes, verdict_of
from training.files import write_json

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH]
#: Tail losses at the four lengths, as the claims say.
LOSSES = {
    "alibi": [1.6] * 4,
    "kerple": [1.5] * 4,
    "forget_gate": [1.4] * 4,
    "rope": [1.45, 1.6, 2.0, 2.5],
    "p_rope": [1.45, 1.6, 2.0, 2.5],
    "yarn": [1.5, 1.55, 1.6, 2.0],
    "ntk": [1.48, 1.6, 1.8, 2.2],
    "pi": [2.5, 2.8, 3.1, 3.2],
    "learned": [1.6, 2.5, 2.9, 3.1],
    "sinusoidal": [1.7, 2.5, 2.9, 3.1],
}
STEPS = {"rope": 250, "learned": 400, "sinusoidal": 550}
COPIED = {"none": 0.9, "sinusoidal": 0.1, "learned": 0.0, "t5": 0.2, "alibi": 0.1, "rope": 0.0, "forget_gate": 0.1}


def run(study: str, task: str, scheme: str, seed: int, **figures: Any) -> dict[str, Any]:
    return {"task": task, "scheme": scheme, "seed": seed, "status": "finished", "config": "{}", **figures}


def runs_like_the_claims(seeds: int = 5, sign: float = 1.0) -> dict[str, list[dict[str, Any]]]:
    """Runs in which every claim holds, with noise of 0.001; with the sign -1, every order is turned around."""
    generator = np.random.default_rng(0)
    main, tasks = [], []
    for seed in range(seeds):
        for scheme, losses in LOSSES.items():
            tail = [2 + sign * (loss - 2) + generator.normal(scale=1e-3) for loss in losses]
            texts = [[loss + text / 1000 for text in range(-2, 3)] for loss in tail]
            steps = 1000 + sign * (STEPS.get(scheme, 500) - 1000)
            curve = {"step": [50, int(steps) + 50 * seed, 3000], "validation_loss": [3.0, 1.6, 1.5]}
            reading = {"lengths": LENGTHS, "tail_loss": tail, "window_tail_loss": texts}
            main.append(run("reference", "causal", scheme, seed, by_length=reading, curve=curve))
        for scheme, share in COPIED.items():
            beyond = 0.5 + sign * (share - 0.5) + generator.normal(scale=1e-3)
            # Only the mean over the longer texts counts.
            accuracy = [1.0, *(beyond + step for step in (0.1, 0.1, 0.0, 0.0, -0.1, -0.1))]
            reading = {"lengths": [claims.COPIED, *claims.BEYOND], "accuracy": accuracy}
            tasks.append(run("reference_tasks", "copy", scheme, seed, exact_match=reading))
    return {"reference": main, "reference_tasks": tasks}


def verdicts(results: list[Outcome]) -> dict[str, set[str]]:
    return {claim.number: {outcome.verdict for outcome in results if outcome.claim is claim} for claim in CLAIMS}


def test_the_protocol_registers_these_claims_and_no_others() -> None:
    protocol = (ROOT / "docs" / "study" / "protocol.md").read_text(encoding="utf-8")
    table = protocol.partition("## Claims")[2].partition("## Models")[0]
    assert re.findall(r"^\| (\d\w?) \|", table, re.MULTILINE) == [claim.number for claim in CLAIMS]
    assert f"within {claims.MARGIN} nats" in table
    assert f"{claims.REACHED:.2f} nats" in table


@pytest.mark.parametrize("scheme", ["none", "rope"])
def test_a_scheme_that_has_not_learned_to_copy_decides_nothing(scheme: str) -> None:
    """Otherwise a scheme that learns slowly, and copies nothing at any length, would contradict the claim."""
    runs = runs_like_the_claims(sign=-1.0)
    for training in runs["reference_tasks"]:
        if training["scheme"] == scheme:
            training["exact_match"]["accuracy"] = [0.45, *[0.0] * 6]
    by_test = {str(outcome.test): outcome for outcome in outcomes(runs) if outcome.claim.number == "4"}
    others = {test for test in by_test if scheme == "none" or test.startswith(f"{scheme} <")}
    assert {test for test, outcome in by_test.items() if outcome.verdict == "not decidable"} == others
    assert all(by_test[test].p == by_test[test].p_opposite == 1 for test in others)


def test_what_was_not_run_is_said_and_makes_nothing_else_more_certain() -> None:
    complete = runs_like_the_claims()
    part = outcomes({"reference": complete["reference"]})
    assert verdicts(part)["4"] == {"not run"}
    for outcome, other in zip(outcomes(complete), part, strict=True):
        assert other.p >= outcome.p
    assert {outcome.verdict for outcome in outcomes(runs_like_the_claims(seeds=1))} == {"not run"}


def test_a_training_that_diverged_counts_and_is_not_left_out() -> None:
    runs = runs_like_the_claims()
    for training in runs["reference"]:
        if training["scheme"] == "kerple" and training["seed"] > 2:
            training |= {
                "status": "diverged",
                "token_frequencies": 3.0,
                "max_steps": 2000,
                "by_length": None,
                "curve": None,
            }
    (result,) = [outcome for outcome in outcomes(runs) if outcome.claim.number == "1a"]
    assert result.seeds == 5
    assert result.difference.value == pytest.approx((3 * -0.1 + 2 * 1.4) / 5, abs=0.01)
    assert result.verdict == "undecided"


def test_equal_differences_of_few_seeds_decide_nothing() -> None:
    runs = runs_like_the_claims(seeds=2)
    for training in runs["reference"]:
        training["curve"] = {"step": [100, 350 + 50 * (training["scheme"] != "rope")], "validation_loss": [1.7, 1.6]}
    (result,) = [outcome for outcome in outcomes(runs) if str(outcome.test) == "rope < learned"]
    assert result.difference.value == result.difference.low == 0
    assert result.verdict == "undecided"


def test_the_verdict_of_a_claim_needs_all_its_tests() -> None:
    """A difference beyond the margin contradicts an equivalence."""
    runs = runs_like_the_claims()
    flat = [outcome for outcome in outcomes(runs) if outcome.claim.number == "2"]
    assert verdict_of(flat) == "confirmed"
    for training in runs["reference"]:
        if training["scheme"] == "alibi":
            training["by_length"]["window_tail_loss"][-1][0] += 5 * 0.05
    results = [outcome for outcome in outcomes(runs) if outcome.claim.number == "2"]
    assert [outcome.verdict for outcome in results] == ["contradicted", "confirmed", "confirmed"]
    assert verdict_of(results) == "contradicted"
    runs["reference"] = [training for training in runs["reference"] if training["scheme"] != "alibi"]
    assert verdict_of([outcome for outcome in outcomes(runs) if outcome.claim.number == "2"]) == "not run"


def test_the_command_reads_archives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in runs_like_the_claims().items():
        for row in rows:
            folder = tmp_path / name / "trainings" / f"{row['task']}-{row['scheme']}-seed{row['seed']}"
            write_json(folder / "result.json", row | {"config": None})
            write_json(folder / "settings.json", {"learning_rate": 1e-3})
        archive.pack(tmp_path / name, tmp_path / f"{name}.parquet")
    assert claims.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 17
    assert lines[0].split()[:5] == ["1a", "kerple", "<", "alibi", "confirmed"]
    assert claims.main([str(tmp_path / "nothing")]) == 2
    assert "has no archive" in capsys.readouterr().err
