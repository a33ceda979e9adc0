"""Pictures with labels: scikit-learn's handwritten digits, a folder with one folder per class, or a hub dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Subset

from hf_posenc.errors import UsageError
from hf_posenc.installation import require

#: 1,797 pictures of 8 x 8 pixels by 43 writers (E. Alpaydin and C. Kaynak 1998, "Optical Recognition of Handwritten
#: Digits", UCI Machine Learning Repository). They are part of scikit-learn.
DIGITS = "digits"
DIGITS_SOURCE = "scikit-learn's digits"
#: The usual names of these columns in datasets.
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img", "pixel_values"), ("label", "labels", "fine_label")


@dataclass(frozen=True)
class Pictures:
    """Pictures that are decoded when they are read.

    Args:
        source: where they come from.
        items: a sequence of pictures as tensors `(channels, height, width)` in [0, 1], or as PIL images.
        labels: class number of each picture.
        classes: name of each class.
    """

    source: str
    items: Any
    labels: tuple[int, ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> Tensor:
        """Returns `(channels, height, width)` float32 in [0, 1], with 1 channel for a grey picture, otherwise 3."""
        return as_tensor(self.items[index])

    def select(self, indices: Sequence[int]) -> Pictures:
        """Returns some of the pictures."""
        labels = tuple(self.labels[index] for index in indices)
        return Pictures(self.source, Subset(self.items, list(indices)), labels, self.classes)


def as_tensor(item: Any) -> Tensor:
    """Returns a PIL image as `(channels, height, width)` float32 in [0, 1]; a tensor is returned as it is."""
    if isinstance(item, Tensor):
        return item
    import numpy

    deep = item.mode in ("I", "I;16", "F")
    image = item if item.mode == "L" or deep else item.convert("RGB")
    values = torch.from_numpy(numpy.array(image, dtype=numpy.float32))
    values = values / (65535.0 if deep else 255.0)
    return values[None] if values.dim() == 2 else values.permute(2, 0, 1)


def load_pictures(
    name: str | None = None,
    config_name: str | None = None,
    split: str = "train",
    *,
    image_column: str | None = None,
    label_column: str | None = None,
) -> Pictures:
    """Loads pictures with their labels.

    Args:
        name: "digits" (the default) for scikit-learn's, a local folder with one folder per class, or a hub dataset.
        config_name: configuration of a hub dataset.
        split: split of the dataset.
        image_column: the column with the pictures; by default it is found by its usual names.
        label_column: the column with the labels; by default it is found by its usual names.

    Raises:
        UsageError: if the pictures cannot be found, have no labels, or need a package that is not installed.
    """
    digits, path = name in (None, DIGITS), Path(str(name))
    unread = {"config_name": config_name} if digits or path.is_dir() else {}
    if digits:
        other = None if split == "train" else split
        unread |= {"split": other, "image_column": image_column, "label_column": label_column}
    for option, value in unread.items():
        if value is not None:
            raise UsageError(
                f"{'The digits have' if digits else f'A folder such as {path.name} has'} no {option}={value}."
            )
    if digits:
        return _digits()
    require(f"The pictures {name}", "datasets")
    from datasets import ClassLabel, exceptions, load_dataset

    try:
        if path.is_dir():
            dataset = load_dataset("imagefolder", data_dir=str(path), split=split)
        else:
            dataset = load_dataset(str(name), config_name, split=split)
    except (OSError, ValueError, exceptions.DatasetsError) as error:
        raise UsageError(
            f"Cannot load the pictures {name!r}: {error} Use 'digits', a folder with one folder per class, or a "
            "dataset on the hub."
        ) from error
    columns = dataset.column_names
    chosen = {}
    for kind, given, usual in (("image", image_column, IMAGE_COLUMNS), ("label", label_column, LABEL_COLUMNS)):
        wanted = [name for name in ((given,) if given else usual) if name in columns]
        if not wanted:
            raise UsageError(
                f"{name!r} has no column {given or ' or '.join(usual)} with the {kind}s; its columns: "
                f"{', '.join(columns)}. Name one with --{kind}_column; a folder needs one folder per class."
            )
        chosen[kind] = wanted[0]
    labels, feature = dataset[chosen["label"]], dataset.features[chosen["label"]]
    if isinstance(feature, ClassLabel):
        names = tuple(feature.names)
        numbers = tuple(int(label) for label in labels)
    else:
        names = tuple(sorted({str(label) for label in labels}))
        numbers = tuple(names.index(str(label)) for label in labels)
    # A column reads a picture when it is indexed.
    return Pictures(path.name if path.is_dir() else str(name), dataset[chosen["image"]], numbers, names)


def _digits() -> Pictures:
    require("The handwritten digits (name a folder to read other pictures)", "sklearn")
    from sklearn.datasets import load_digits

    digits = load_digits()
    pictures = torch.from_numpy(digits.images).float()[:, None] / 16
    classes = tuple(str(number) for number in digits.target_names)
    return Pictures(DIGITS_SOURCE, list(pictures), tuple(int(label) for label in digits.target), classes)


def resized(picture: Tensor, resolution: int, channels: int) -> Tensor:
    """Resizes a picture `(channels, height, width)` to `(channels, resolution, resolution)`, bicubic, in [0, 1].

    It is stretched to a square, as in transformers' image processors of ViT. If its channels change, it becomes grey.
    """
    if picture.shape[0] != channels:
        grey = picture.mean(dim=0, keepdim=True)
        picture = grey.expand(channels, -1, -1)
    if picture.shape[-2:] == (resolution, resolution):
        return picture
    larger = functional.interpolate(
        picture[None], (resolution, resolution), mode="bicubic", antialias=True, align_corners=False
    )
    return larger[0].clamp(0, 1)


@dataclass(frozen=True)
class Normalization:
    """The normalisation of pixels that a model expects: `(value - mean) / std` for values in [0, 1]."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalises `(..., channels, height, width)`."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (pixels - mean) / std
