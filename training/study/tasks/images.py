"""The task of classifying pictures, at the resolution of training and at others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForImageClassification, PreTrainedTokenizerBase

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.evaluation import digest
from hf_posenc.metrics.images.patches import PatchSize
from hf_posenc.metrics.images.pictures import Normalization, Pictures, load_pictures
from hf_posenc.metrics.images.resolution import check_resolutions, resolution_test
from hf_posenc.metrics.images.sensitivity import SIDE, picture_dog_test
from training.data.loading import first_rows, split_rows
from training.data.pictures import Augmentation, PictureRows, image_processor, picture_batch
from training.errors import SettingsError, settings_errors
from training.study.corpus import Corpus
from training.study.models import new_image_model
from training.study.settings import StudySettings, SwapArguments, TrainingSettings
from training.study.tasks.task import CellData, StudyTask, dog_figures, figures_of

if TYPE_CHECKING:
    from training.study.cells import Cell

_CHANNELS = 3


class ImagesTask(StudyTask):
    """Classifying pictures. Its lengths are resolutions: pixels along each side."""

    kind = "image_classification"
    loader = AutoModelForImageClassification
    figures = "by_resolution"

    @property
    def lengths(self) -> list[int]:
        return self.settings.test_resolutions or [self.settings.train_resolution]

    def train_lengths(self, settings: TrainingSettings) -> list[int]:
        return [settings.train_resolution]

    def check(self, study: StudySettings) -> None:
        if self.pretrained:
            raise SettingsError(
                f"The task {self.name!r} trains new weights. To train a pretrained classifier, use "
                "training/run_image_classification.py, or omit --model_name_or_path."
            )
        side = self.settings.patch_size
        with settings_errors("--train_resolution, --test_resolutions", MeasurementError):
            check_resolutions(PatchSize(side, side, _CHANNELS), [self.settings.train_resolution, *self.lengths])

    def refusal(self, swap: SwapArguments) -> str | None:
        return f"the task {self.name!r} does not support swap options." if swap.given() else None

    def identity(self, cell: Cell, digests: dict[str, str]) -> dict[str, Any]:
        return {"pictures digest": digests.get("pictures")}

    def data(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
        train, validation, test = study_pictures(cell.study)
        settings, augmentation = cell.settings, Augmentation(cell.settings.random_crop, seed=cell.seed)
        return CellData(
            train=PictureRows(train, settings.train_resolution, _CHANNELS, Normalization(), augmentation),
            collate=partial(picture_batch, interpolate_pos_encoding=True),
            validation=PictureRows(validation, self.settings.train_resolution, _CHANNELS, Normalization()),
            positions=(max(self.lengths) // self.settings.patch_size) ** 2,
            pictures=test,
        )

    def new_model(
        self, settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase, positions: int, classes: int = 1
    ) -> Any:
        return new_image_model(self, settings, classes)

    def try_out(self, model: Any, data: CellData) -> None:
        batch = data.collate([data.train[0]])
        model(**{name: value for name, value in batch.items() if name != "labels"})

    def read(self, cell: Cell, model: Any, data: CellData, whole: bool = True) -> dict[str, Any]:
        assert data.pictures is not None
        result = resolution_test(model, dataset=data.pictures, resolutions=self.lengths)
        return {
            "lengths": self.lengths,
            "accuracy": figures_of(result, "accuracy"),
            "loss": figures_of(result, "loss"),
            "reasons": sorted({record.note for record in result.records if record.note}),
        }

    def dogs(self, cell: Cell, model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        grid = cell.settings.train_resolution // cell.settings.patch_size
        # In opposite corners, so that both fit into small grids.
        return dog_figures(lambda: picture_dog_test(model, grid=grid, first=(0, 0), second=(0, grid - SIDE)))

    def processor(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> Any:
        return image_processor(cell.settings.train_resolution, Normalization(), _CHANNELS)

    def facts(self, study: StudySettings, corpus: Corpus | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {"pictures": pictures_summary(study)}


def study_pictures(study: StudySettings) -> tuple[Pictures, Pictures, Pictures]:
    """Returns the pictures for training, for the curves, and for the accuracy by resolution."""
    pictures = load_pictures(study.dataset_name, study.dataset_config_name, study.dataset_split)
    sizes = [round(len(pictures) * share) for share in (study.validation_fraction, study.test_fraction)]
    train, validation, test = split_rows(pictures, sizes, study.split_seed)
    most = study.max_train_samples, study.max_eval_samples
    return first_rows(train, most[0]), first_rows(validation, most[1]), first_rows(test, most[1])


def pictures_summary(study: StudySettings) -> dict[str, Any]:
    """Describes the pictures of a study, JSON-ready; `digest` identifies them."""
    train, validation, test = parts = study_pictures(study)
    digests = [PictureRows(part, 8, _CHANNELS, Normalization()).digest() for part in parts]
    return {
        "source": train.source,
        "classes": len(train.classes),
        "train_pictures": len(train),
        "validation_pictures": len(validation),
        "test_pictures": len(test),
        "digest": digest(*digests),
    }
