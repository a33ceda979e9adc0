"""The registry of evaluations. The subcommand, the script in `eval/` and the `evaluate` module use it.

An evaluation is imported when it is used, so the command line can list them without importing torch.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

#: The parameters for texts, and how they combine several. Other parameters for data take one item at a time.
_TEXTS: dict[str, Callable[[Iterable[str]], Any]] = {"texts": list, "text": "\n".join}
_ITEMS = ("sentence", "task")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Its data is passed as `texts`, `text`, `sentence` or `task`. The command line reads texts from the files given with
    `--text`, and an `evaluate` module measures each sentence or task separately.

    Args:
        summary: one-line description for the command line.
        function: `"module:name"` of a function `(model, tokenizer, ..., schemes, ...)` that returns a
            `hf_posenc.report.Result`. For image models, it has no `tokenizer`. If it measures only schemes, it has
            neither `model` nor `tokenizer`. Its other parameters are the options.
        plot: `"module:name"` of a function `(result, path)` that draws a figure.
        reference: source paper or data.
    """

    summary: str
    function: str
    plot: str | None = None
    reference: str = ""

    def measure(self) -> Callable[..., Any]:
        """Imports and returns the function."""
        return pkgutil.resolve_name(self.function)

    def draw(self) -> Callable[..., Any]:
        """Imports and returns the function that draws a figure."""
        assert self.plot is not None
        return pkgutil.resolve_name(self.plot)

    @property
    def data(self) -> str | None:
        """The parameter for data; `None` if the evaluation takes none."""
        return next((name for name in inspect.signature(self.measure()).parameters if name in (*_TEXTS, *_ITEMS)), None)

    @property
    def texts(self) -> Callable[[Iterable[str]], Any] | None:
        """Combines several texts into the value of the parameter for data; `None` if it takes no texts."""
        return _TEXTS.get(self.data or "")


EVALUATIONS: dict[str, Evaluation] = {
    "dog": Evaluation(
        "can the model distinguish the dogs in 'The dog chased another dog'?",
        "hf_posenc.metrics.dog:dog_test",
        plot="hf_posenc.plots.dog:plot_dog",
    ),
    "properties": Evaluation(
        "is a scheme unique, relative, linear, bounded, exact in half precision ...? One table.",
        "hf_posenc.metrics.properties.table:properties_table",
    ),
    "loss": Evaluation(
        "loss and perplexity by length and by position, on held-out text",
        "hf_posenc.metrics.language_modeling.by_length:text_losses",
        plot="hf_posenc.plots.losses:plot_losses",
    ),
    "sensitivity": Evaluation(
        "repeated words at many gaps, exchanged roles, a shuffled context, shifted positions",
        "hf_posenc.metrics.sensitivity:sensitivity_test",
    ),
    "generalization": Evaluation(
        "exact match by length of a model that was trained on a synthetic task",
        "hf_posenc.metrics.generalization.exact_match:compare_generalization",
        reference="Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization in Transformers",
    ),
    "minimal-pairs": Evaluation(
        "does the model assign the grammatical one of two texts the higher probability?",
        "hf_posenc.metrics.minimal_pairs:minimal_pairs_accuracy",
        reference="Srivastava et al. 2022, Beyond the Imitation Game",
    ),
    "quantized": Evaluation(
        "the loss with only positions, encodings or keys in low precision",
        "hf_posenc.metrics.quantization:quantization_test",
        reference="Hooper et al. 2024, KVQuant (arXiv:2401.18079)",
    ),
    "attention": Evaluation(
        "how far back, and how widely, each layer attends on a text",
        "hf_posenc.metrics.attention:attention_test",
    ),
    "image-sensitivity": Evaluation(
        "equal patches of an image in two places, and shuffled patches",
        "hf_posenc.metrics.images.sensitivity:image_sensitivity_test",
    ),
    "picture-dog": Evaluation(
        "can a model of images distinguish two equal dogs in one picture?",
        "hf_posenc.metrics.images.sensitivity:picture_dog_test",
        plot="hf_posenc.plots.dog:plot_picture_dog",
    ),
    "resolution": Evaluation(
        "accuracy of an image classifier by resolution",
        "hf_posenc.metrics.images.resolution:resolution_test",
        reference="Heo et al. 2024, Rotary Position Embedding for Vision Transformer (arXiv:2403.13298)",
    ),
}
