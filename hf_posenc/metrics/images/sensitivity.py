"""What the place of a patch means to a model of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.forward import rounding
from hf_posenc.metrics.images.patches import PatchSize, cut, drawn_images, joined_patches, patch_outputs
from hf_posenc.metrics.in_turn import check_schemes, measure_in_turn
from hf_posenc.metrics.statistics import relative_changes
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig

STEPS = (1, 3)
_REMARK = (
    "Numbers are relative L2 distances behind the last layer. Right, down: two patches with the same pixels, so many "
    "patches apart in a row or in a column, in an image of random pixels. Shuffled: the patches of an image change "
    "places, and each state is compared with that of the same pixels before; whole: the same for the output of the "
    "whole image. Without positions all are 0, up to rounding. A scheme that numbers patches row by row takes a patch "
    "below for one that is far away."
)


def image_sensitivity_test(
    model: Any,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    grid: int = 8,
    steps: Sequence[int] = STEPS,
    images: int = 4,
    seed: int = 0,
) -> Result:
    """Measures whether a model of images tells equal patches apart by their place, and what shuffled patches change.

    An image model sees its patches from both sides, so without positions equal patches have equal states in every
    layer, and shuffled patches have the states that they had before. What differs is what the scheme adds. The images
    are random pixels, because the question is about places, not about content.

    The model is left as it was found, also after an error.

    Args:
        model: a transformers model of images alone, patched or not.
        schemes: what is measured, one after the other; see `measure_in_turn`.
        grid: patches in a row and in a column of the image.
        steps: distances of the two equal patches, in patches.
        images: number of images that the means are over.
        seed: of pixels, of the shuffle, and of newly created scheme weights.

    Returns:
        Records of these quantities, each a mean relative L2 distance:

        - `right` and `down`, by `step` and `layer` (0: the input of the first layer): two equal patches in a row, and
          in a column.
        - `shuffled`, by `layer`: the states of patches that have changed places. `whole`: the output for the image
          (logits, pooled output or class token), if there is one.
        - `sees_places`: passed if any of these is larger than rounding.

        A scheme that the model cannot take has the reason in the `error` of its subject.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is touched.
        MeasurementError: if the grid is too small for the steps.
        UnsupportedError: if the model is not one of images alone, or merges its patches.
    """
    check_schemes(schemes)
    if images < 1 or not steps or min(steps) < 1 or max(steps) >= grid:
        raise MeasurementError(
            f"Two patches of a grid of {grid} are 1 to {grid - 1} patches apart, in at least one image; got "
            f"steps={list(steps)} and images={images}."
        )
    size = PatchSize.of(model)
    drawn = cut(drawn_images(size, images, grid, grid, seed), size)
    order = torch.randperm(grid * grid, generator=torch.Generator().manual_seed(seed))
    shuffled = drawn.flatten(1, 2)[:, order].unflatten(1, (grid, grid))
    tolerance = rounding(next(model.parameters()).dtype)
    # Places from which both steps lead to a patch of the grid.
    row = column = 0

    def measure(patched: Any) -> list[Record]:
        records = []
        for step in sorted(set(steps)):
            for name, other in (("right", (row, column + step)), ("down", (row + step, column))):
                pair = drawn.clone()
                pair[:, other[0], other[1]] = pair[:, row, column]
                for layer, state in enumerate(patch_outputs(patched, joined_patches(pair)).states):
                    distances = relative_changes(state[:, row, column], state[:, other[0], other[1]])
                    at = {"step": step, "layer": layer}
                    records.append(Record("", name, float(distances.mean()), at, count=images))
        before, after = (patch_outputs(patched, joined_patches(one)) for one in (drawn, shuffled))
        for layer, (state, moved) in enumerate(zip(before.states, after.states, strict=True)):
            same = state.flatten(1, 2)[:, order]
            distances = relative_changes(same.flatten(0, 1), moved.flatten(1, 2).flatten(0, 1))
            records.append(Record("", "shuffled", float(distances.mean()), {"layer": layer}, count=images))
        if before.whole is not None and after.whole is not None:
            distance = float(relative_changes(before.whole, after.whole).mean())
            records.append(Record("", "whole", distance, count=images))
        largest = max(one.value or 0.0 for one in records)
        return [*records, Record("", "sees_places", passed=largest > tolerance)]

    subjects, records = measure_in_turn(model, schemes, measure, seed=seed)
    last = max((record.at["layer"] for record in records if "layer" in record.at), default=0)
    return Result(
        task="image_sensitivity",
        title=f"{type(model).__name__}: relative distances of patches, {grid} x {grid} in an image",
        quantities=(
            Quantity("right", "{step} right"),
            Quantity("down", "{step} down"),
            Quantity("shuffled", "shuffled"),
            Quantity("whole", "whole"),
            Quantity("sees_places", "sees places", style="verdict"),
        ),
        subjects=subjects,
        records=records,
        views=(View(("right", "down", "shuffled", "whole", "sees_places"), shown={"layer": [last]}),),
        settings={
            "model": type(model).__name__,
            "grid": grid,
            "patch": [size.height, size.width],
            "images": images,
            "tolerance": tolerance,
            "seed": seed,
        },
        remarks=(_REMARK,),
    )
