"""Accuracy of an image classifier, by the resolution at which it reads pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.errors import MeasurementError, SequenceLengthError, UnsupportedError
from hf_posenc.metrics.evaluation import digest, evaluation_result, measure_schemes
from hf_posenc.metrics.images.patches import PatchSize, run_images
from hf_posenc.metrics.images.pictures import Normalization, Pictures, load_pictures, resized
from hf_posenc.metrics.statistics import wilson_interval
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig


def check_resolutions(size: PatchSize, resolutions: Sequence[int]) -> None:
    """Refuses resolutions that are not a whole number of patches, at least one.

    Raises:
        MeasurementError: with the nearest resolution that fits.
    """
    for resolution in resolutions:
        if resolution < max(size.height, size.width) or resolution % size.height or resolution % size.width:
            nearest = max(1, round(resolution / size.height)) * size.height
            raise MeasurementError(
                f"A picture of {resolution} pixels is not a whole number of patches of {size.height} x {size.width} "
                f"pixels. Use {nearest}."
            )


def resolution_test(
    model: Any,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    resolutions: Sequence[int],
    dataset: str | Pictures = "digits",
    split: str = "train",
    normalization: Normalization | None = None,
    max_pictures: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Result:
    """Measures the accuracy of an image classifier on the same pictures at several resolutions.

    With a scheme that is set after training, this shows what the scheme does to a trained model, not what a model could
    learn with it. For that, train a model with it (`training/run_image_classification.py`, `training/compare.py`).

    Args:
        model: an image classifier, patched or not; it is left unchanged.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        resolutions: pixels along each side of the pictures; must be whole patches.
        dataset: "digits" for scikit-learn's, a folder with one folder per class, or a dataset on the hub; in Python,
            also pictures with labels.
        split: split of the dataset.
        normalization: normalisation of pixels; by default from [0, 1] to [-1, 1].
        max_pictures: maximum number of pictures, evenly spread; `None` reads all of them.
        batch_size: pictures per forward.
        seed: seed of newly created scheme weights.

    Returns:
        For each scheme and `resolution`, in ascending order, the `accuracy` with its 95 % Wilson interval over
        pictures, and the `loss`, the mean cross-entropy in nats; or the reason if the model cannot read the resolution.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        MeasurementError: if there are no pictures, a resolution is not a whole number of patches, or the classes are
            not those of the model.
        UnsupportedError: if the model is not an image classifier.
        UsageError: if the pictures cannot be loaded.
    """
    size, resolutions = PatchSize.of(model), sorted(set(resolutions))
    check_resolutions(size, resolutions)
    pictures = load_pictures(dataset, split=split) if isinstance(dataset, str) else dataset
    if max_pictures is not None and max_pictures < len(pictures):
        pictures = pictures.select([index * len(pictures) // max_pictures for index in range(max_pictures)])
    if not len(pictures):
        raise MeasurementError("There are no pictures to classify.")
    classes = getattr(unwrapped(model).config, "num_labels", None)
    if classes is not None and len(pictures.classes) > classes:
        raise MeasurementError(
            f"{pictures.source} has {len(pictures.classes)} classes, but the model has {classes}: it was trained on "
            "other pictures."
        )
    labels, normalize = torch.tensor(pictures.labels), normalization or Normalization()

    def logits_at(patched: Any, resolution: int) -> Tensor:
        """Returns `(pictures, classes)`."""
        batches = []
        for indices in torch.arange(len(pictures)).split(batch_size):
            pixels = [resized(pictures.picture(int(index)), resolution, size.channels) for index in indices]
            logits = getattr(run_images(patched, normalize(torch.stack(pixels))), "logits", None)
            if logits is None or logits.dim() != 2:
                raise MeasurementError(
                    f"{type(unwrapped(patched)).__name__} returns no logits for a picture. Load it with "
                    "AutoModelForImageClassification."
                )
            batches.append(logits.float().cpu())
        return torch.cat(batches)

    def measure(patched: Any) -> list[Record]:
        records: list[Record] = []
        for resolution in resolutions:
            at, count = {"resolution": resolution}, len(pictures)
            try:
                logits = logits_at(patched, resolution)
            except (UnsupportedError, SequenceLengthError) as error:
                note = f"{resolution} pixels: {error}"
                records += [Record("", "accuracy", None, at, count=count, note=note), Record("", "loss", None, at)]
                continue
            right = int((logits.argmax(-1) == labels).sum())
            records.append(Record("", "accuracy", right / count, at, *wilson_interval(right, count), count))
            records.append(Record("", "loss", float(functional.cross_entropy(logits, labels)), at))
        return records

    return evaluation_result(
        "resolution",
        f": {pictures.source}, right answers by resolution",
        model,
        measure_schemes(model, schemes, measure, seed=seed),
        (
            Quantity("accuracy", "{resolution} pixels (%)", style="percent_tenths"),
            Quantity("loss", "loss at {resolution}", style="loss"),
        ),
        views=(View(("accuracy",)), View(("loss",))),
        settings={
            "data": digest(str(pictures.labels)),
            "pictures": pictures.source,
            "count": len(pictures),
            "resolutions": resolutions,
            "seed": seed,
        },
        remarks=("Intervals are 95 % Wilson intervals over the pictures.",),
    )
