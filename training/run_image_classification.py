r"""Trains an image classifier, from scratch or from pretrained weights, with any position encoding.

    python training/run_image_classification.py --scheme rope_nd --scheme_options '{"assignment": "mixed"}' \
        --eval_resolutions 24 32 48 --output_dir outputs/rope_nd --num_train_epochs 30 --learning_rate 1e-3
    accelerate launch --config_file training/accelerate/ddp_gpu.yaml training/run_image_classification.py \
        --model_name_or_path google/vit-base-patch16-224 --dataset_name my_photos --output_dir outputs/photos

Without further options, a small ViT learns the handwritten digits that come with scikit-learn. All options can be in
one YAML or JSON file, and flags after it override it. Run the same command again to resume.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, which has modules of common names

from transformers import AutoModelForImageClassification, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.image_processing_base import ImageProcessingMixin

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.images.patches import PatchSize, size_options
from hf_posenc.metrics.images.pictures import Normalization, Pictures, load_pictures
from hf_posenc.metrics.images.resolution import check_resolutions, resolution_test
from training.argument_files import parse_arguments
from training.arguments import (
    DatasetArguments,
    RunArguments,
    SchemeArguments,
    WeightsArguments,
    require,
    require_at_least,
)
from training.data.loading import first_rows, split_rows
from training.data.pictures import Augmentation, PictureRows, image_processor, picture_batch
from training.errors import SettingsError, settings_errors
from training.one_run import exit_status, finish, set_up, start, train_and_evaluate, trains
from training.starting_model import apply_scheme, stock_model
from training.trainer import data_seed, training_steps

logger = logging.getLogger("run_image_classification")

#: File in the output folder with the accuracy by resolution, for `hf-posenc report`.
RESOLUTION_FILE = "resolution.json"
#: The default model, small enough for a CPU. ViT initialises weights with a standard deviation of 0.02, which is meant
#: for 768 dimensions. With 64 dimensions, attention would stay uniform for too long.
SMALL_VIT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128, "patch_size": 4,
    "initializer_range": 0.05,
}  # fmt: skip
#: Resolution of the small ViT.
_SMALL_RESOLUTION = 32


@dataclass
class ImageModelArguments(WeightsArguments):
    """The image classifier to train, and its initial weights. By default, a ViT with 4 layers of width 64."""

    ignore_mismatched_sizes: bool = HfArg(
        default=False, help="Train a new head if the head of the pretrained model has other classes."
    )

    def __post_init__(self) -> None:
        self.small = not (self.model_name_or_path or self.config_name or self.model_type)
        if self.small:
            self.model_type = "vit"
        super().__post_init__()


@dataclass
class ImageArguments(DatasetArguments):
    """The pictures to read, and their resolutions."""

    _argument_group_name = "pictures"

    dataset_name: str = HfArg(
        default="digits",
        help="'digits' for the 1,797 handwritten digits of scikit-learn, a folder with one folder per class, or a "
        "dataset on the hub.",
    )
    validation_split_percentage: float = HfArg(default=20.0, help="Percentage of the data to hold out for validation.")
    image_column: str | None = HfArg(default=None, help="The column of pictures. Default: image or img.")
    label_column: str | None = HfArg(default=None, help="The column of labels. Default: label, labels or fine_label.")
    train_resolution: int | None = HfArg(
        default=None,
        help="Pixels along each side during training. Pictures are stretched to a square. Default: that of the "
        "pretrained model or config, and 32 for the small ViT.",
    )
    eval_resolutions: list[int] = field(
        default_factory=list,
        metadata={
            "help": "Resolutions at which to measure the accuracy after training. Default: that of training.",
            "nargs": "+",
        },
    )
    random_crop: float = HfArg(
        default=1.0, help="During training, crop to a random part of at least this share of a picture; 1: no crop."
    )
    random_flip: bool = HfArg(
        default=False, help="During training, mirror a random half of the pictures. Not for digits and letters."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, train_resolution=1)
        if self.eval_resolutions and min(self.eval_resolutions) < 1:
            raise SettingsError(f"--eval_resolutions contains {min(self.eval_resolutions)}; it must be at least 1.")
        require("more than 0 and at most 1", self, random_crop=0 < self.random_crop <= 1)


#: All options, in the order of the arguments of `train`.
OPTIONS = (ImageModelArguments, SchemeArguments, ImageArguments, RunArguments, TrainingArguments)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `exit_status`."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status("run_image_classification", lambda: train(*parse_arguments(OPTIONS, words, __doc__)))


def train(
    model_options: ImageModelArguments,
    scheme: SchemeArguments,
    images: ImageArguments,
    run: RunArguments,
    arguments: TrainingArguments,
) -> dict[str, float]:
    """Trains and evaluates. Resumes if the output folder contains checkpoints of this run.

    Returns:
        The content of `all_results.json`: loss and accuracy at the resolution of training, and `accuracy_at_N` for each
        of the `--eval_resolutions` that the model can read.
    """
    # Options: invalid ones are refused before anything is written.
    set_up(arguments, model_options, scheme, images)

    # Data: pictures and their classes.
    with arguments.main_process_first(desc="loading pictures"):
        train_part, validation_part = _pictures(images)

    # Model: the stock model for these classes. It determines which resolutions are possible.
    model = _stock_model(model_options, images, train_part, arguments.seed)
    size, resolution = PatchSize.of(model), _resolution(images, model)
    resolutions = images.eval_resolutions or [resolution]
    with settings_errors("--train_resolution, --eval_resolutions", MeasurementError):
        check_resolutions(size, [resolution, *resolutions])

    # Patch: the scheme replaces the native one.
    apply_scheme(model, scheme)

    # Rows: pixels as the model reads them.
    normalization = _normalization(model_options)
    augmentation = Augmentation(images.random_crop, images.random_flip, data_seed(arguments))
    train_rows = PictureRows(train_part, resolution, size.channels, normalization, augmentation)
    eval_rows = PictureRows(validation_part, resolution, size.channels, normalization)
    if trains(arguments):
        training_steps(len(train_rows), arguments)

    # Trainer: a run only resumes if the settings that determine its curve are the same.
    decisive: dict[str, Any] = {
        "objective": "image_classification", "train_pictures": train_rows.digest(), "resolution": resolution,
        "random_crop": images.random_crop, "random_flip": images.random_flip, **asdict(scheme),
    }  # fmt: skip
    if arguments.load_best_model_at_end:
        decisive["validation_pictures"] = eval_rows.digest()
    trainer, checkpoint = start(
        run, arguments, model, decisive, causal=False, train_dataset=train_rows, eval_dataset=eval_rows,
        data_collator=partial(picture_batch, **size_options(model)),
        processing_class=image_processor(resolution, normalization, size.channels),
    )  # fmt: skip

    # Train, evaluate and save.
    results: dict[str, float] = {"train_rows": len(train_rows), "eval_rows": len(eval_rows)}
    logger.info(
        "%d pictures of %d classes from %s, %d more to validate on; %d pixels.",
        len(train_rows), len(train_part.classes), train_part.source, len(eval_rows), resolution,
    )  # fmt: skip
    results |= train_and_evaluate(trainer, checkpoint)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    measured = resolution_test(
        trained, resolutions=resolutions, dataset=validation_part, normalization=normalization,
        batch_size=arguments.per_device_eval_batch_size,
    )  # fmt: skip
    accuracies = {record.at["resolution"]: record.value for record in measured.of(quantity="accuracy")}
    results |= {f"accuracy_at_{size}": value for size, value in accuracies.items() if value is not None}
    if trainer.is_world_process_zero():
        measured.save(Path(str(arguments.output_dir), RESOLUTION_FILE))
        print(measured.table())
    finish(trainer, results)
    return results


def _pictures(images: ImageArguments) -> tuple[Pictures, Pictures]:
    """Returns the pictures for training and for validation."""
    load = partial(
        load_pictures, images.dataset_name, images.dataset_config_name,
        image_column=images.image_column, label_column=images.label_column,
    )  # fmt: skip
    if images.validation_split is None:
        pictures = load(images.dataset_split)
        held_out = round(len(pictures) * (images.validation_split_percentage / 100))
        train, validation = split_rows(pictures, [held_out], images.split_seed)
    else:
        train, validation = load(images.dataset_split), load(images.validation_split)
        if train.classes != validation.classes:
            raise SettingsError(
                f"--validation_split {images.validation_split} has other classes ({', '.join(validation.classes[:5])}, "
                f"...) than --dataset_split {images.dataset_split} ({', '.join(train.classes[:5])}, ...)."
            )
    return first_rows(train, images.max_train_samples), first_rows(validation, images.max_eval_samples)


def _stock_model(options: ImageModelArguments, images: ImageArguments, pictures: Pictures, seed: int) -> Any:
    """Returns the stock classifier for these classes."""
    names = dict(enumerate(pictures.classes))
    classes = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    changes: dict[str, Any] = classes | (SMALL_VIT if options.small else {})
    wanted = images.train_resolution or (_SMALL_RESOLUTION if options.small else None)
    if wanted is not None:
        changes["image_size"] = wanted
    mismatched = options.ignore_mismatched_sizes
    return stock_model(
        options, AutoModelForImageClassification, seed, changes, ignore_mismatched_sizes=mismatched, **classes
    )


def _resolution(images: ImageArguments, model: Any) -> int:
    named = getattr(model.config, "image_size", None)
    resolution = images.train_resolution or (named if isinstance(named, int) else None)
    if resolution is None:
        raise SettingsError(
            f"The config of {type(model).__name__} has no resolution (image_size is {named}). Give --train_resolution."
        )
    return resolution


def _normalization(arguments: ImageModelArguments) -> Normalization:
    """Returns the normalization of a pretrained model's image processor; from [0, 1] to [-1, 1] if it has none."""
    if arguments.model_name_or_path is None:
        return Normalization()
    try:
        processor, _ = ImageProcessingMixin.get_image_processor_dict(
            arguments.model_name_or_path, revision=arguments.model_revision
        )
    except OSError:
        logger.warning(
            "%s has no image processor. Its pixels are assumed to be in [-1, 1].", arguments.model_name_or_path
        )
        return Normalization()
    if "image_mean" not in processor:
        return Normalization()
    return Normalization(tuple(processor["image_mean"]), tuple(processor["image_std"]))


if __name__ == "__main__":
    sys.exit(main())
