"""The page that says which scheme runs where, against exports made now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.generate.runtimes import page
from tests.export.runtimes import RUNTIMES, SCHEMES, outcome
from tests.thinning import mostly_slow
from tests.versions import EXPORTER, since

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs" / "results" / "runtimes.json").read_text())
#: Targets that take seconds for each scheme. In the default run, tests of their own export a few schemes to them.
SLOW_TARGETS = ("onnx", "executorch", "remote_code")
EXPORTS = {
    (model, runtime.target): [one for one in runtimes if one.target == runtime.target]
    for model, runtimes in RUNTIMES.items()
    for runtime in runtimes
}


def quick() -> set[tuple[str, str, str]]:
    """All exports, and for each reason of a refusal the first scheme that has it."""
    kept: dict[tuple[str, ...], tuple[str, str, str]] = {}
    for case in ((*place, scheme) for place in EXPORTS for scheme in SCHEMES):
        model, target, scheme = case
        recorded = RECORD["cells"][model][target].get(scheme, {})
        kept.setdefault((model, target, recorded["because"]) if "refused" in recorded else case, case)
    return {case for case in kept.values() if case[1] not in SLOW_TARGETS}


CASES = mostly_slow([(*place, scheme) for place in EXPORTS for scheme in SCHEMES], quick().__contains__)


@pytest.mark.parametrize(("model", "target", "scheme"), CASES)
def test_an_export_gives_equal_numbers_or_is_refused_as_the_page_says(model: str, target: str, scheme: str) -> None:
    if target in ("onnx", "executorch"):
        since(*EXPORTER)
    columns = EXPORTS[model, target]
    found, recorded = outcome(model, scheme, columns[0]), RECORD["cells"][model][target].get(scheme)
    if recorded is None:
        return  # A new scheme: it is refused, or its numbers were compared. The page is written before a release.
    assert ("refused" in found) == ("refused" in recorded), found
    if "refused" in found:
        assert found["because"] == recorded["because"]
    else:
        # `export_model` has compared the numbers. Here, they are those of this processor.
        assert found["carrier"] == recorded["carrier"]
        assert len(found["checks"]) == len(recorded["checks"])


def test_the_page_is_that_of_the_record() -> None:
    assert (ROOT / "docs" / "reference" / "runtimes.md").read_text() == page(RECORD)
