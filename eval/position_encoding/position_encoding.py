"""The evaluations as a module of `evaluate`, by name.

`evaluate.load("eval/position_encoding", "generalization").compute(data=["copy"], model="FOLDER", lengths=[10, 20])`
"""

from __future__ import annotations

from typing import Any

# Two lines, because evaluate reads imports line by line and treats everything after `import` as one package.
import datasets
import evaluate

from hf_posenc.errors import UnknownNameError
from hf_posenc.evaluations import EVALUATIONS, Evaluation
from hf_posenc.loading import load_model, load_tokenizer

_INPUTS = """
Args:
    data: values of the parameter `{data}`.
    model: a transformers model, patched or not, or its hub id or folder.
    tokenizer: the same for its tokenizer; by default that of the model's folder.
    options: the other parameters of `{function}`.

Returns:
    `hf_posenc.report.Result.to_dict()`{each}.
"""


class PositionEncodingEvaluation(evaluate.Measurement):
    """One of `hf_posenc.evaluations.EVALUATIONS` that takes data, selected by the name of its configuration."""

    @property
    def _evaluation(self) -> Evaluation:
        known = {name: evaluation for name, evaluation in EVALUATIONS.items() if evaluation.data is not None}
        if self.config_name not in known:
            remedy = "It is the second argument of evaluate.load."
            raise UnknownNameError("evaluation", str(self.config_name), known, remedy=remedy)
        return known[self.config_name]

    def _info(self) -> evaluate.MeasurementInfo:
        evaluation = self._evaluation
        names = {"data": evaluation.data, "function": evaluation.function.replace(":", ".")}
        return evaluate.MeasurementInfo(
            module_type="measurement",
            description=f"{self.config_name}: {evaluation.summary}",
            citation=evaluation.reference,
            inputs_description=_INPUTS.format(**names, each="" if evaluation.texts else ", for each of the data"),
            features=datasets.Features({"data": datasets.Value("string")}),
        )

    def _compute(self, data: list[str], model: Any, tokenizer: Any = None, **options: Any) -> dict[str, Any]:
        evaluation = self._evaluation
        if tokenizer is None and not isinstance(model, str):
            raise ValueError(
                f"The tokenizer of a loaded {type(model).__name__} is not known. Pass tokenizer=, or pass the model "
                "as a hub id or folder."
            )
        tokenizer = model if tokenizer is None else tokenizer
        model = load_model(model) if isinstance(model, str) else model
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer

        def measured(given: Any) -> dict[str, Any]:
            result = evaluation.measure()(model, tokenizer, **{str(evaluation.data): given}, **options)
            entries: dict[str, Any] = result.to_dict()
            return entries

        if evaluation.texts is None:
            return {item: measured(item) for item in data}
        return measured(evaluation.texts(data))
