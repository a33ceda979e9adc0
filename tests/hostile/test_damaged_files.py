"""Damaged and hostile files: each is read as it was written, or refused with its name, quickly and in little memory.

`HF_POSENC_FUZZ=20` draws twenty times as many inputs.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import printed, run_fresh
from tests.hostile.child import KINDS
from tests.hostile.kinds import MULTIPLE

#: What a refusal may be, by the names of the classes: an error of the library, or the stock one for an unreadable file.
REFUSALS = {"CheckpointError", "SettingsError", "MeasurementError", "UnknownNameError", "OSError"}
#: Errors of transformers that are `ValueError`s and say what is wrong with the file.
STOCK_REFUSALS = ("transformers file in the config", "Unrecognized model", "model type", "does not recognize")
#: Seconds of processor time and MB of memory that one file of a few kilobytes may cost; a sound one costs 0.1 and 10.
SECONDS, MEGABYTES = 5.0, 300.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The outcome of every input, by kind."""
    folder = tmp_path_factory.mktemp("hostile")
    text = printed(run_fresh("from tests.hostile.child import main; main()", folder, *KINDS, timeout=1200.0 * MULTIPLE))
    lines = [line.removeprefix("RESULT ") for line in text.splitlines() if line.startswith("RESULT ")]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    for line in lines:
        result = json.loads(line)
        found[result["kind"]].append(result)
    return found


def problem(result: dict[str, Any], same: bool) -> str | None:
    """What is wrong with an outcome; `None` for nothing."""
    if result["seconds"] > SECONDS or result["megabytes"] > MEGABYTES:
        return f"{result['seconds']:.1f} s, {result['megabytes']:.0f} MB"
    if "read" in result:
        allowed = {"same", "reported"} if same and not result["neutral"] else {"same"}
        return None if result["read"] in allowed or not same else f"read: {result['read']}"
    said = f"{result['error'][0]}: {result['message'][:300]}\n{result['trace'][-1500:]}"
    if result["neutral"]:
        return f"means the same, and was refused: {said}"
    if {"TooLong", "MemoryError"} & set(result["error"]):
        return said
    if not result["ours"]:
        return None
    stock = "ValueError" in result["error"] and any(words in result["message"] for words in STOCK_REFUSALS)
    if not REFUSALS & set(result["error"]) and not stock:
        return f"not a refusal: {said}"
    if not any(word and word in result["message"] for word in result["words"]):
        return f"names neither the file nor the field: {said}"
    return None


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_damaged_file_is_read_as_written_or_refused_by_name(results: dict[str, Any], kind: str) -> None:
    found = results[kind]
    problems = {f"{result['number']}: {result['what']}": problem(result, KINDS[kind].same) for result in found}
    wrong = [f"{what}\n    {why}" for what, why in problems.items() if why is not None]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong[:10])
    assert len(found) >= KINDS[kind].inputs * MULTIPLE


@pytest.mark.parametrize("kind", KINDS)
def test_the_damage_is_neither_harmless_nor_always_fatal(results: dict[str, Any], kind: str) -> None:
    """If there were only one outcome, the test could not detect an error."""
    outcomes = Counter("read" if "read" in result else "refused" for result in results[kind])
    assert outcomes["refused"] >= 10
    assert outcomes["read"] >= 1


@pytest.mark.skipif(MULTIPLE != 1, reason="the page has the counts of an ordinary run")
@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_the_number_of_inputs(results: dict[str, Any], kind: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")
    assert f"| {KINDS[kind].title} | {len(results[kind])} |" in page
