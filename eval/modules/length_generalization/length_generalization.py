"""Exact match by length on synthetic tasks.

`evaluate.load("eval/modules/length_generalization").compute(data=["copy"], model="FOLDER", lengths=[10, 20])`
"""

from __future__ import annotations

from typing import Any

# Two lines: evaluate reads the imports of a module line by line, and takes what follows `import` for one package.
import datasets
import evaluate

from hf_posenc.integrations.evaluate_inputs import model_and_tokenizer
from hf_posenc.metrics.generalization import compare_generalization

_DESCRIPTION = "Exact match on synthetic tasks, at the lengths that a model was trained on and at longer ones."

_INPUTS = """
Args:
    data: names of synthetic tasks, such as `copy`, `reverse` or `parity`.
    model: a transformers model, patched or not, or its hub id or folder.
    tokenizer: the same for its tokenizer; by default that of the model's folder.
    options: those of `hf_posenc.metrics.generalization.compare_generalization`.

Returns:
    for each task `hf_posenc.report.Result.to_dict()`.
"""

_CITATION = "Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization in Transformers"


class LengthGeneralization(evaluate.Measurement):
    """`hf_posenc.metrics.generalization.compare_generalization` as a module of `evaluate`."""

    def _info(self) -> evaluate.MeasurementInfo:
        return evaluate.MeasurementInfo(
            module_type="measurement",
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"data": datasets.Value("string")}),
        )

    def _compute(self, data: list[str], model: Any, tokenizer: Any = None, **options: Any) -> dict[str, Any]:
        model, tokenizer = model_and_tokenizer(model, tokenizer)
        return {task: compare_generalization(model, tokenizer, task, **options).to_dict() for task in data}
