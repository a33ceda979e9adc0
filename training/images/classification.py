"""One training run of an image classifier, from parsed arguments to a saved model and its figures."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageClassification, TrainingArguments
from transformers.image_processing_base import ImageProcessingMixin

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.images.patches import PatchSize
from hf_posenc.metrics.images.pictures import Normalization, Pictures
from hf_posenc.metrics.images.resolution import accuracy_by_resolution, check_resolutions, resolution_result
from training.argument_files import parse_arguments
from training.arguments import RunArguments, SchemeArguments, check_trainer_arguments
from training.checkpoints import SETTINGS_FILE, checkpoint_settings
from training.errors import SettingsError
from training.files import write_json
from training.images.arguments import SMALL_VIT, ImageArguments, ImageModelArguments
from training.images.rows import Augmentation, PictureBatches, PictureRows, image_processor, training_pictures
from training.one_run import build_trainer, exit_status, finish, set_up_logging, starting_point, train_and_save, trains
from training.scheme_code import note_scheme_code
from training.starting_model import apply_scheme, stock_model, weights_digest
from training.trainer import row_order

logger = logging.getLogger(__name__)

_ARGUMENTS = (ImageModelArguments, SchemeArguments, ImageArguments, RunArguments, TrainingArguments)
#: In the output folder: the accuracy by resolution, for `hf-posenc report`.
RESOLUTION_FILE = "resolution.json"
#: Of the small ViT.
_SMALL_RESOLUTION = 32


@dataclass(frozen=True)
class ImageRunInput:
    """All arguments of a run."""

    model: ImageModelArguments
    scheme: SchemeArguments
    images: ImageArguments
    run: RunArguments
    trainer: TrainingArguments


def run_image_classification(program: str, words: list[str] | None, description: str | None) -> int:
    """The command line of `run_image_classification.py`. Returns the exit status, see `exit_status`.

    Args:
        program: name of the script, for messages.
        words: of the command line; by default those of the process.
        description: for `--help`.
    """

    def run() -> None:
        given = parse_arguments(_ARGUMENTS, sys.argv[1:] if words is None else words, description)
        train_image_classifier(ImageRunInput(*given))

    return exit_status(program, run)


def train_image_classifier(given: ImageRunInput) -> dict[str, float]:
    """Trains and evaluates; resumes if the output folder holds this run's checkpoints.

    All arguments are checked before anything is written.

    Args:
        given: all arguments.

    Returns:
        The content of `all_results.json`: loss and accuracy at the resolution of training, and `accuracy_at_N` for each
        of `--eval_resolutions` that the model can read.

    Raises:
        SettingsError: for arguments that cannot work.
        TrainingError: if the training had to stop.
    """
    arguments, images = given.trainer, given.images
    folder = Path(str(arguments.output_dir))
    set_up_logging(arguments)
    arguments.remove_unused_columns = False
    check_trainer_arguments(arguments)
    with arguments.main_process_first(desc="loading pictures"):
        train_part, validation_part = training_pictures(images)
    model = _build_model(given, train_part)
    size = PatchSize.of(model)
    resolution = _resolution(given, model)
    resolutions = images.eval_resolutions or [resolution]
    try:
        check_resolutions(size, [resolution, *resolutions])
    except MeasurementError as error:
        raise SettingsError(f"--train_resolution, --eval_resolutions: {error}") from error
    apply_scheme(model, given.scheme)
    normalization = _normalization(given.model)
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    augmentation = Augmentation(images.random_crop, images.random_flip, seed)
    train = PictureRows(train_part, resolution, size.channels, normalization, augmentation)
    validation = PictureRows(validation_part, resolution, size.channels, normalization)
    if trains(arguments):
        row_order(len(train), arguments)
    settings = checkpoint_settings(
        arguments,
        objective="image_classification",
        train_pictures=train.digest(),
        initial_weights=weights_digest(model),
        resolution=resolution,
        random_crop=images.random_crop,
        random_flip=images.random_flip,
        scheme=given.scheme,
    )
    if arguments.load_best_model_at_end:
        settings["validation_pictures"] = validation.digest()
    note_scheme_code(settings, model)
    begun, checkpoint = starting_point(given.run, arguments, settings)
    trainer = build_trainer(
        arguments,
        model,
        causal=False,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=PictureBatches(model),
        processing_class=image_processor(resolution, normalization, size.channels),
    )
    if trainer.is_world_process_zero() and not begun:
        write_json(folder / SETTINGS_FILE, settings)
    results: dict[str, float] = {"train_rows": len(train), "eval_rows": len(validation)}
    logger.info(
        "%d pictures of %d classes from %s, %d more to validate on; %d pixels.",
        len(train), len(train_part.classes), train_part.source, len(validation), resolution,
    )  # fmt: skip
    if trains(arguments):
        results |= train_and_save(trainer, checkpoint)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    results |= metrics
    trained = trainer.accelerator.unwrap_model(trainer.model)
    rows = accuracy_by_resolution(
        trained, validation_part, resolutions, normalization=normalization,
        batch_size=arguments.per_device_eval_batch_size,
    )  # fmt: skip
    results |= {f"accuracy_at_{row.resolution}": row.accuracy for row in rows if row.accuracy is not None}
    if trainer.is_world_process_zero():
        measured = resolution_result(trained, validation_part, rows)
        measured.save(folder / RESOLUTION_FILE)
        print(measured.table())
    finish(trainer, results, pushes=trains(arguments) and arguments.push_to_hub)
    return results


def _build_model(given: ImageRunInput, pictures: Pictures) -> Any:
    """The stock classifier of these classes.

    Raises:
        SettingsError: if it cannot be built, or its head is for other classes.
    """
    names = dict(enumerate(pictures.classes))
    classes = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    changes: dict[str, Any] = dict(classes)
    if given.model.small:
        changes |= SMALL_VIT
    wanted = given.images.train_resolution or (_SMALL_RESOLUTION if given.model.small else None)
    if wanted is not None:
        changes["image_size"] = wanted
    return stock_model(
        given.model,
        AutoModelForImageClassification,
        given.trainer.seed,
        changes,
        ignore_mismatched_sizes=given.model.ignore_mismatched_sizes,
        **classes,
    )


def _resolution(given: ImageRunInput, model: Any) -> int:
    named = getattr(model.config, "image_size", None)
    resolution = given.images.train_resolution or (named if isinstance(named, int) else None)
    if resolution is None:
        raise SettingsError(
            f"The config of {type(model).__name__} names no resolution (image_size is {named}). Give "
            "--train_resolution."
        )
    return resolution


def _normalization(arguments: ImageModelArguments) -> Normalization:
    """That of a pretrained model's image processor; from [0, 1] to [-1, 1] for a model without one."""
    if arguments.model_name_or_path is None:
        return Normalization()
    try:
        found, _ = ImageProcessingMixin.get_image_processor_dict(
            arguments.model_name_or_path, revision=arguments.model_revision
        )
    except OSError:
        logger.warning(
            "%s has no image processor; its pixels are taken to be in [-1, 1].", arguments.model_name_or_path
        )
        return Normalization()
    if "image_mean" not in found:
        return Normalization()
    return Normalization(tuple(found["image_mean"]), tuple(found["image_std"]))
