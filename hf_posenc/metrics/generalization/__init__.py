"""Synthetic length generalisation: train on short problems, test on long ones, count the answers that are right."""

from hf_posenc.metrics.generalization.comparison import compare_generalization
from hf_posenc.metrics.generalization.encoding import IGNORED, encode_example
from hf_posenc.metrics.generalization.exact_match import exact_match
from hf_posenc.metrics.generalization.examples import SyntheticExamples, held_out_examples
from hf_posenc.metrics.generalization.result import GeneralizationResult, GeneralizationRow
from hf_posenc.metrics.generalization.task import Example, SyntheticTask
from hf_posenc.metrics.generalization.tasks import SYNTHETIC_TASKS, get_task

__all__ = [
    "IGNORED",
    "SYNTHETIC_TASKS",
    "Example",
    "GeneralizationResult",
    "GeneralizationRow",
    "SyntheticExamples",
    "SyntheticTask",
    "compare_generalization",
    "encode_example",
    "exact_match",
    "get_task",
    "held_out_examples",
]
