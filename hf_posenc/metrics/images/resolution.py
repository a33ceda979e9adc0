"""Accuracy of an image classifier, by the resolution at which it reads pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hf_posenc.errors import MeasurementError, SequenceLengthError, UnsupportedError
from hf_posenc.metrics.evaluation import Measured, digest, evaluation_result, measure_as_is, measure_schemes
from hf_posenc.metrics.images.patches import PatchSize, run_images
from hf_posenc.metrics.images.pictures import Normalization, Pictures, load_pictures, resized
from hf_posenc.metrics.statistics import wilson_interval
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig


@dataclass(frozen=True)
class ResolutionRow:
    """The result at one resolution.

    Args:
        resolution: pixels along each side.
        right: number of pictures whose class has the largest logit; `None` if the model cannot read this resolution.
        pictures: number of pictures that were read.
        loss: mean cross-entropy in nats.
        reason: why there is no number.
    """

    resolution: int
    right: int | None
    pictures: int
    loss: float | None
    reason: str = ""

    @property
    def accuracy(self) -> float | None:
        """Fraction of the pictures that are classified correctly."""
        return None if self.right is None else self.right / self.pictures


def accuracy_by_resolution(
    model: Any,
    pictures: Pictures,
    resolutions: Sequence[int],
    *,
    normalization: Normalization | None = None,
    batch_size: int = 64,
) -> list[ResolutionRow]:
    """Classifies the same pictures at several resolutions; the model is left unchanged.

    Args:
        model: an image classifier.
        pictures: pictures with labels.
        resolutions: pixels along each side; must be whole patches.
        normalization: normalisation of pixels; by default from [0, 1] to [-1, 1].
        batch_size: pictures per forward.

    Returns:
        One row per resolution, in ascending order, with the reason if the model cannot read it.

    Raises:
        MeasurementError: if there are no pictures, or a resolution is not a whole number of patches.
        UnsupportedError: if the model is not an image classifier.
    """
    size = PatchSize.of(model)
    if not len(pictures):
        raise MeasurementError("There are no pictures to classify.")
    check_resolutions(size, resolutions)
    normalize = Normalization() if normalization is None else normalization
    rows = []
    for resolution in sorted(set(resolutions)):
        right, loss = 0, 0.0
        try:
            for start in range(0, len(pictures), batch_size):
                indices = range(start, min(start + batch_size, len(pictures)))
                pixels = [resized(pictures.picture(index), resolution, size.channels) for index in indices]
                logits = getattr(run_images(model, normalize(torch.stack(pixels))), "logits", None)
                if logits is None or logits.dim() != 2:
                    raise MeasurementError(
                        f"{type(unwrapped(model)).__name__} returns no logits for a picture. Load it with "
                        "AutoModelForImageClassification."
                    )
                labels = torch.tensor([pictures.labels[index] for index in indices])
                logits = logits.float().cpu()
                right += int((logits.argmax(-1) == labels).sum())
                loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        except (UnsupportedError, SequenceLengthError) as error:
            rows.append(ResolutionRow(resolution, None, len(pictures), None, str(error)))
        else:
            rows.append(ResolutionRow(resolution, right, len(pictures), loss / len(pictures)))
    return rows


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
    dataset: str = "digits",
    split: str = "train",
    max_pictures: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Result:
    """Measures the accuracy of an image classifier by resolution.

    With a scheme that is set after training, this shows what the scheme does to a trained model, not what a model could
    learn with it. For that, train a model with it (`training/run_image_classification.py`, `training/compare.py`).

    Args:
        model: an image classifier, patched or not; it is left unchanged.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        resolutions: pixels along each side of the pictures.
        dataset: "digits" for scikit-learn's, a folder with one folder per class, or a dataset on the hub.
        split: split of the dataset.
        max_pictures: maximum number of pictures, evenly spread; `None` reads all of them.
        batch_size: pictures per forward.
        seed: seed of newly created scheme weights.

    Returns:
        For each scheme and `resolution`, the `accuracy` with its 95 % Wilson interval over pictures, and the `loss` in
        nats; or the reason if the model cannot read the resolution.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        MeasurementError: if a resolution is not a whole number of patches, or the classes are not those of the model.
        UnsupportedError: if the model is not an image classifier.
        UsageError: if the pictures cannot be loaded.
    """
    check_resolutions(PatchSize.of(model), resolutions)
    pictures = load_pictures(dataset, split=split)
    if max_pictures is not None and max_pictures < len(pictures):
        pictures = pictures.select([index * len(pictures) // max_pictures for index in range(max_pictures)])
    classes = getattr(unwrapped(model).config, "num_labels", None)
    if classes is not None and len(pictures.classes) > classes:
        raise MeasurementError(
            f"{pictures.source} has {len(pictures.classes)} classes, but the model has {classes}: it was trained on "
            "other pictures."
        )

    def measure(patched: Any) -> list[Record]:
        return _records(accuracy_by_resolution(patched, pictures, resolutions, batch_size=batch_size))

    return _result(model, pictures, measure_schemes(model, schemes, measure, seed=seed), seed=seed)


def resolution_result(model: Any, pictures: Pictures, rows: Sequence[ResolutionRow]) -> Result:
    """Returns the result of one model as it is, from the rows of `accuracy_by_resolution`."""
    return _result(model, pictures, measure_as_is(model, lambda _: _records(rows)))


def _records(rows: Sequence[ResolutionRow]) -> list[Record]:
    records = []
    for row in rows:
        at, note = {"resolution": row.resolution}, f"{row.resolution} pixels: {row.reason}" if row.reason else ""
        low, high = (None, None) if row.right is None else wilson_interval(row.right, row.pictures)
        records.append(Record("", "accuracy", row.accuracy, at, low, high, row.pictures, note=note))
        records.append(Record("", "loss", row.loss, at))
    return records


def _result(model: Any, pictures: Pictures, measured: Measured, **settings: Any) -> Result:
    _, records = measured
    resolutions = list(dict.fromkeys(record.at["resolution"] for record in records))
    return evaluation_result(
        "resolution",
        f": {pictures.source}, right answers by resolution",
        model,
        measured,
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
            **settings,
        },
        remarks=("Intervals are 95 % Wilson intervals over the pictures.",),
    )
