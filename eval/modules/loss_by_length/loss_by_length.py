"""Loss and perplexity by length and by position.

`evaluate.load("eval/modules/loss_by_length").compute(data=["a text", ...], model="FOLDER", lengths=[128, 512])`
"""

from __future__ import annotations

from typing import Any

# Two lines: evaluate reads the imports of a module line by line, and takes what follows `import` for one package.
import datasets
import evaluate

from hf_posenc.integrations.evaluate_inputs import model_and_tokenizer
from hf_posenc.metrics.language_modeling import text_losses

_DESCRIPTION = "Loss and perplexity of a language model on held-out text, by length and by position."

_INPUTS = """
Args:
    data: held-out documents.
    model: a transformers model, patched or not, or its hub id or folder.
    tokenizer: the same for its tokenizer; by default that of the model's folder.
    options: those of `hf_posenc.metrics.language_modeling.text_losses`.

Returns:
    `hf_posenc.report.Result.to_dict()`.
"""

_CITATION = ""


class LossByLength(evaluate.Measurement):
    """`hf_posenc.metrics.language_modeling.text_losses` as a module of `evaluate`."""

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
        return text_losses(model, tokenizer, list(data), **options).to_dict()
