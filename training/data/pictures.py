"""Pictures as rows of one size. The random draws for a row depend only on the seed, the epoch and the row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate
from transformers import ViTImageProcessorPil
from transformers.image_utils import PILImageResampling

from hf_posenc.metrics.evaluation import digest
from hf_posenc.metrics.images.pictures import Normalization, Pictures, resized
from training.data.order import EpochRow, RowsByEpoch

#: Number of pictures in a digest.
_DIGEST_PICTURES = 64
#: The sides of a crop differ by at most this factor.
_ASPECT = 4 / 3


@dataclass(frozen=True)
class Augmentation:
    """Random changes to pictures during training.

    Args:
        crop: the smallest share of the area that a crop keeps; 1 does not crop.
        flip: whether to mirror a picture with a probability of one half.
        seed: seed of the random draws.
    """

    crop: float = 1.0
    flip: bool = False
    seed: int = 0

    def __call__(self, picture: Tensor, row: int, epoch: int) -> Tensor:
        """Returns a picture `(channels, height, width)` as it appears in one epoch."""
        if self.crop == 1 and not self.flip:
            return picture
        drawn = np.random.default_rng([self.seed, epoch, row])
        height, width = picture.shape[-2:]
        share, aspect = drawn.uniform(self.crop, 1), math.exp(drawn.uniform(-1, 1) * math.log(_ASPECT))
        rows = min(height, max(1, round(height * math.sqrt(share * aspect))))
        columns = min(width, max(1, round(width * math.sqrt(share / aspect))))
        top, left = (int(drawn.integers(whole - part + 1)) for whole, part in ((height, rows), (width, columns)))
        cut = picture if self.crop == 1 else picture[:, top : top + rows, left : left + columns]
        return cut.flip(-1) if self.flip and drawn.random() < 0.5 else cut


@dataclass(eq=False)
class PictureRows(RowsByEpoch):
    """Pictures at one resolution: `pixel_values` `(channels, resolution, resolution)` and `labels`, a number.

    Args:
        pictures: pictures with labels.
        resolution: pixels along each side.
        channels: number of channels that the model reads.
        normalization: normalization of pixels.
        augmentation: random changes; `None` for none.
    """

    pictures: Pictures
    resolution: int
    channels: int
    normalization: Normalization
    augmentation: Augmentation | None = None

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: EpochRow | int) -> dict[str, Any]:
        epoch, row = index if isinstance(index, tuple) else (0, index)
        picture = self.pictures.picture(row)
        if self.augmentation is not None:
            picture = self.augmentation(picture, row, epoch)
        pixels = self.normalization(resized(picture, self.resolution, self.channels))
        return {"pixel_values": pixels, "labels": self.pictures.labels[row]}

    def digest(self) -> str:
        """Returns a digest of the labels, and of up to 64 evenly spread pictures as they appear in epoch 0."""
        count = min(_DIGEST_PICTURES, len(self))
        shown = (self[number * len(self) // count]["pixel_values"] for number in range(count))
        return digest(repr((self.pictures.source, self.pictures.labels)), *shown)


def picture_batch(rows: Sequence[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Returns `pixel_values` `(batch, channels, resolution, resolution)`, `labels` `(batch,)` int64, and `options`."""
    batch: dict[str, Any] = default_collate(list(rows))
    return batch | options


def image_processor(resolution: int, normalization: Normalization, channels: int) -> ViTImageProcessorPil:
    """Returns an image processor for `pipeline("image-classification")` that prepares pictures as rows do."""
    mean, std = (
        list(values) * (channels if len(values) == 1 else 1) for values in (normalization.mean, normalization.std)
    )
    return ViTImageProcessorPil(
        size={"height": resolution, "width": resolution},
        resample=PILImageResampling.BICUBIC,
        image_mean=mean,
        image_std=std,
    )
