"""The packaged BIG-bench files, read in place and never trained on."""

import os
from pathlib import Path

import pytest

from hf_posenc.metrics.minimal_pairs import HOW_TO_GET, read_minimal_pairs

pytestmark = pytest.mark.assets


@pytest.fixture(scope="module")
def tasks():
    """The folder bigbench/benchmark_tasks of the unpacked package."""
    folder = Path(os.environ.get("HF_POSENC_BIGBENCH", "bigbench-1.0.0/bigbench/benchmark_tasks"))
    if not (folder / "subject_verb_agreement").is_dir():
        pytest.skip(f"HF_POSENC_BIGBENCH names no folder with subject_verb_agreement in it. {HOW_TO_GET}")
    return folder


def test_every_file_is_read(tasks):
    found = {}
    for file in sorted((tasks / "subject_verb_agreement").glob("*.json")):
        task = read_minimal_pairs(file)
        found[file.stem] = (len(task.pairs), task.skipped)
        for pair in task.pairs:
            assert pair.texts[0] != pair.texts[1]
            assert pair.texts[0].startswith(pair.prefix.strip())
    assert len(found) == 20
    assert found["nounpp_english"] == (2400, 0)
    assert found["linzen2016_english"] == (499, 1)  # one example has one verb only
    assert all(skipped == 0 for name, (_, skipped) in found.items() if name != "linzen2016_english")
    hyperbaton = read_minimal_pairs(tasks / "hyperbaton")
    assert (len(hyperbaton.pairs), hyperbaton.skipped) == (50_000, 0)
    # The same words in two orders, in all of them.
    assert all(sorted(pair.right.split()) == sorted(pair.wrong.split()) for pair in hyperbaton.pairs)
