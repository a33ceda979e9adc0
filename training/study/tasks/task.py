"""The base class of all kinds of tasks: what models are trained on, and how they are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_posenc import SequenceLengthError, UnsupportedError
from hf_posenc.metrics import MeasurementError, dog_test
from hf_posenc.metrics.generalization import SYNTHETIC_TASKS
from hf_posenc.metrics.images.pictures import Pictures
from hf_posenc.report import Result
from training.study.models import new_model
from training.study.settings import StudySettings, SwapArguments, TrainingSettings
from training.swapping import sample_rows
from training.trainer import SchemeTrainer

if TYPE_CHECKING:
    from training.study.cells import Cell
    from training.study.corpus import Corpus

#: The sizes of new models.
SHAPE = ("hidden_size", "num_layers", "num_heads")
_TEXT = ("causal", "masked", "embedding")
#: The tasks that read a setting. All tasks read the others. "synthetic" stands for all of `SYNTHETIC_TASKS`.
READERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("train_length", "length_factor", "eval_windows", "text_column"), _TEXT),
    "train_lengths": ("embedding", "synthetic"),
    "test_lengths": (*_TEXT, "synthetic"),
    "test_samples": ("synthetic",),
    "pose_length": ("embedding",),
    "mlm_probability": ("masked",),
    "tokenizer_name": (*_TEXT, "synthetic"),
    **dict.fromkeys(
        ("dataset_name", "dataset_config_name", "dataset_split", "validation_fraction", "split_seed",
         "max_train_samples", "max_eval_samples"), (*_TEXT, "images"),
    ),
    **dict.fromkeys(
        ("train_resolution", "test_resolutions", "patch_size", "random_crop", "test_fraction"), ("images",)
    ),
}  # fmt: skip


@dataclass
class CellData:
    """The data of one training.

    Args:
        train: the training set. A cell without training also has one, because initial parameters may be fitted on it.
        collate: makes batches of its items, and of those of `validation`.
        validation: data for the points of the curve: text of the training length, or examples of the training lengths
            that are not in the training set.
        positions: number of positions of the longest evaluated sequence.
        windows: text to evaluate by length, `input_ids` and `labels`, `(windows, longest length)` each; `None` for
            other tasks.
        pictures: pictures to evaluate by resolution; `None` for other tasks than images.
        teacher: the encoder that embeddings are compared with, in the task "embedding".
    """

    train: Any
    collate: Callable[[list[Any]], dict[str, Tensor]]
    validation: Any
    positions: int
    windows: dict[str, Tensor] | None = None
    pictures: Pictures | None = None
    teacher: Any = None


@dataclass(frozen=True)
class StudyTask:
    """A task that models of a study are trained on. Each kind of task is a class.

    Args:
        name: "causal", "masked", "embedding", "images", or the name of a synthetic task.
        settings: the settings of its training runs.
        pretrained: whether its models begin with pretrained weights.

    Attributes:
        kind: what is measured, in `results.json`.
        loader: the Auto class of its models.
        causal: whether they predict the next token.
        encoder_decoder: whether they read a prompt with an encoder and write the answer with a decoder.
        figures: the name of the figures in the result of a training.
        reads_text: whether it is trained on the text of the study.
        has_teacher: whether it learns from the model before the swap. A training item is then a whole batch, which
            cannot be split.
    """

    name: str
    settings: TrainingSettings
    pretrained: bool = False

    kind: ClassVar[str]
    loader: ClassVar[Any]
    causal: ClassVar[bool] = False
    encoder_decoder: ClassVar[bool] = False
    figures: ClassVar[str] = "by_length"
    reads_text: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = False

    @property
    def unused(self) -> dict[str, str]:
        """The settings that it does not read, each with the reason."""
        group = "synthetic" if self.name in SYNTHETIC_TASKS else self.name
        unused = {name: f"it is for {', '.join(tasks)}" for name, tasks in READERS.items() if group not in tasks}
        if self.settings.test_lengths:
            unused.setdefault("length_factor", "test_lengths replaces it")
        if self.pretrained:
            shape = (*SHAPE, "model_type", "config_overrides")
            unused |= dict.fromkeys(shape, "the models are that of --model_name_or_path")
        return unused

    @property
    def lengths(self) -> list[int]:
        """The lengths (for images, the resolutions) of the evaluation."""
        raise NotImplementedError

    def train_lengths(self, settings: TrainingSettings) -> list[int]:
        """Returns the training lengths (for images, the resolution) with the settings of the task or of one scheme."""
        raise NotImplementedError

    def check(self, study: StudySettings) -> None:
        """Raises `SettingsError` for settings with which nothing could be measured."""

    def refusal(self, swap: SwapArguments) -> str | None:
        """Returns why its training runs cannot have these options of a swap; `None` if they can."""
        return None

    def identity(self, cell: Cell, digests: dict[str, str]) -> dict[str, Any]:
        """Returns what a result of this kind of task depends on, in addition to `Cell.identity`."""
        return {}

    def data(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
        """Returns the data of a cell."""
        raise NotImplementedError

    def new_model(
        self, settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase, positions: int, classes: int = 1
    ) -> Any:
        """Returns a model with new weights, see `training.study.models`."""
        return new_model(self, settings, tokenizer, positions)

    def sample(self, data: CellData, length: int) -> Tensor:
        """Returns rows for fitting initial parameters, `(rows, length)`."""
        return sample_rows(data.train)

    def try_out(self, model: Any, data: CellData) -> None:
        """Runs the model on the number of positions that are evaluated."""
        tokens = torch.zeros(1, data.positions, dtype=torch.int64, device=model.device)
        model(input_ids=tokens)

    def trainer(self, options: dict[str, Any], swap: SwapArguments, teacher: Any, data: CellData) -> SchemeTrainer:
        """Returns the trainer of a cell."""
        hooks = swap.loss_hooks(options["model"], teacher, self.causal)
        return SchemeTrainer(**options, causal=self.causal, loss_hooks=hooks)

    def read(self, cell: Cell, model: Any, data: CellData, whole: bool = True) -> dict[str, Any]:
        """Returns the figures of a model by length or resolution, JSON-ready."""
        raise NotImplementedError

    def dogs(self, cell: Cell, model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Returns the distances between the two dogs of the dog test, for the embeddings, then for each layer."""
        return dog_figures(lambda: dog_test(model, tokenizer))

    def processor(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Returns the processor that is saved with a model and prepares its inputs."""
        return tokenizer

    def facts(self, study: StudySettings, corpus: Corpus | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Returns the entries of `results.json` for this kind of task, in addition to its settings."""
        return {}


def dog_figures(test: Callable[[], Result]) -> dict[str, Any]:
    """Returns the figures of a dog test, or the reason why there are none. Pictures need no probe."""
    try:
        result = test()
    except (MeasurementError, SequenceLengthError, UnsupportedError) as error:
        return {"error": str(error)}
    (subject,) = result.subjects
    if subject.error is not None:
        return {"error": subject.error}
    layers, probe = (
        [None if record.value is None else float(f"{record.value:.4g}") for record in result.of(quantity=quantity)]
        for quantity in ("relative_l2", "probe")
    )
    told_apart = result.record(subject.label, "told_apart").passed
    return {"layers": layers} | ({"probe": probe[0]} if probe else {}) | {"told_apart": told_apart}


def rounded(values: Any) -> list[float | None]:
    """Returns numbers rounded as in results."""
    return [None if value is None else round(value, 4) for value in values]


def figures_of(result: Result, quantity: str) -> list[float | None]:
    """Returns the numbers of a quantity, rounded, in the order of the result."""
    return rounded([record.value for record in result.of(quantity=quantity)])
