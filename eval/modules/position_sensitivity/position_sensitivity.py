"""What order and place of tokens mean to a model.

`evaluate.load("eval/modules/position_sensitivity").compute(data=["a text", ...], model="FOLDER", gaps=[2, 8])`
"""

from __future__ import annotations

from typing import Any

# Two lines: evaluate reads the imports of a module line by line, and takes what follows `import` for one package.
import datasets
import evaluate

from hf_posenc.integrations.evaluate_inputs import model_and_tokenizer
from hf_posenc.metrics.sensitivity import sensitivity_test

_DESCRIPTION = "Repeated words at many gaps, exchanged roles, a shuffled context, shifted positions."

_INPUTS = """
Args:
    data: texts, of which the context to shuffle and to shift is taken.
    model: a transformers model, patched or not, or its hub id or folder.
    tokenizer: the same for its tokenizer; by default that of the model's folder.
    options: those of `hf_posenc.metrics.sensitivity.sensitivity_test`.

Returns:
    `hf_posenc.report.Result.to_dict()`.
"""

_CITATION = ""


class PositionSensitivityMeasurement(evaluate.Measurement):
    """`hf_posenc.metrics.sensitivity.sensitivity_test` as a module of `evaluate`."""

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
        return sensitivity_test(model, tokenizer, text="\n".join(data), **options).to_dict()
