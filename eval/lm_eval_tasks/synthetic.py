"""The synthetic tasks of hf_posenc as data of an lm-eval task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets

from hf_posenc.metrics.generalization import get_task, held_out_examples


def examples(
    synthetic_task: str = "repeated_copy",
    lengths: Sequence[int] | None = None,
    samples: int = 50,
    seed: int = 0,
    **_other: Any,
) -> dict[str, datasets.Dataset]:
    """Returns held-out examples of a synthetic task.

    Args:
        synthetic_task: name of the task.
        lengths: the lengths to test on; those of the task if `None`.
        samples: examples per length.
        seed: seed of the examples.
        _other: ignored arguments of the model, which lm-eval also passes.
    """
    task = get_task(synthetic_task)
    drawn = [
        {"length": length, "prompt": example.prompt, "answer": example.answer}
        for length in (task.test_lengths if lengths is None else lengths)
        for example in held_out_examples(task, length, samples, seed)
    ]
    return {"test": datasets.Dataset.from_list(drawn)}
