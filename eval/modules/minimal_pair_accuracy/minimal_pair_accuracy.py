"""Grammar in minimal pairs.

`evaluate.load("eval/modules/minimal_pair_accuracy").compute(data=["task.json"], model="FOLDER", samples=200)`
"""

from __future__ import annotations

from typing import Any

# Two lines: evaluate reads the imports of a module line by line, and takes what follows `import` for one package.
import datasets
import evaluate

from hf_posenc.integrations.evaluate_inputs import model_and_tokenizer
from hf_posenc.metrics.minimal_pairs import minimal_pairs_accuracy

_DESCRIPTION = "How often a language model gives the grammatical of two texts the higher probability."

_INPUTS = """
Args:
    data: paths of JSON tasks of BIG-bench.
    model: a transformers model, patched or not, or its hub id or folder.
    tokenizer: the same for its tokenizer; by default that of the model's folder.
    options: those of `hf_posenc.metrics.minimal_pairs.minimal_pairs_accuracy`.

Returns:
    for each path `hf_posenc.report.Result.to_dict()`.
"""

_CITATION = "Srivastava et al. 2022, Beyond the Imitation Game"


class MinimalPairAccuracy(evaluate.Measurement):
    """`hf_posenc.metrics.minimal_pairs.minimal_pairs_accuracy` as a module of `evaluate`."""

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
        return {path: minimal_pairs_accuracy(model, tokenizer, path, **options).to_dict() for path in data}
