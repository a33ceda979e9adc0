"""Synthetic length generalisation: train on short problems, test on long ones, count the right answers."""

from hf_posenc.metrics.generalization.exact_match import compare_generalization
from hf_posenc.metrics.generalization.examples import (
    IGNORED,
    EncoderDecoderCollator,
    SyntheticExamples,
    encode_example,
    held_out_examples,
)
from hf_posenc.metrics.generalization.task import SYNTHETIC_TASKS, Example, SyntheticTask, get_task

__all__ = [
    "IGNORED", "SYNTHETIC_TASKS", "EncoderDecoderCollator", "Example", "SyntheticExamples", "SyntheticTask",
    "compare_generalization", "encode_example", "get_task", "held_out_examples",
]  # fmt: skip
