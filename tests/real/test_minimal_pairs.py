"""The packaged BIG-bench files, and SmolLM2's grammar. The files are read in place and never trained on."""

import os
from pathlib import Path

import pytest
import torch

from hf_posenc.metrics.minimal_pairs import HOW_TO_GET, MinimalPairsTask, minimal_pairs_accuracy, read_minimal_pairs

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


def test_smollm2_agrees_across_an_attractor_with_its_positions_and_not_without(tasks, smollm2_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    task = read_minimal_pairs(tasks / "subject_verb_agreement" / "nounpp_english.json")
    attracted = tuple(pair for pair in task.pairs if pair.conditions[-1] == "singular_plural")
    result = minimal_pairs_accuracy(
        model, tokenizer, MinimalPairsTask(task.name, attracted), ["native", "none"], samples=60
    )
    native, without = (result.record(scheme, "accuracy", condition="all") for scheme in ("native", "none"))
    # Without positions the model agrees with the plural that stands next to the verb.
    assert native.low > 0.5 > without.high
