"""The table of the tests of claims on text, computed again from other studies of the same schemes."""

from __future__ import annotations

from dataclasses import replace

from docs.study.claims import CLAIMS, Comparison
from docs.study.significance import mean_difference
from docs.study.table_numbers import Runs, markdown, ranged

_MAIN = "reference"
#: What each study is called in the head of the table.
_STUDIES = {_MAIN: "main study", "reference_half_rate": "with 0.002", "reference_source": "source code"}


def repeats_table(runs: Runs) -> str:
    """The difference of each test with its interval over seeds, in the main study and in two others."""
    tests = [(claim.number, test) for claim in CLAIMS for test in claim.tests if test.first.study == _MAIN]
    rows = [(number, f"`{test}`", *(_difference(test, study, runs) for study in _STUDIES)) for number, test in tests]
    head = (f"{name}, {_seeds(runs, study)} seeds" for study, name in _STUDIES.items())
    return markdown(("claim", "test", *head), rows if any(any(row[2:]) for row in rows) else [], texts=2)


def _seeds(runs: Runs, study: str) -> int:
    return len({run["seed"] for run in runs.get(study, ())})


def _difference(test: Comparison, study: str, runs: Runs) -> str:
    first, second = (replace(measure, study=study) for measure in (test.first, test.second))
    differences = replace(test, first=first, second=second).differences(runs)
    return ranged(mean_difference(differences), 0 if first.quantity == "steps" else 3) if differences else ""
