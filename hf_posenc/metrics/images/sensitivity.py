"""Sensitivity of an image model to the places of its patches: equal patches, and patches that change places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.dog import SHOWN_LAYERS, distance_quantities, distances_by_layer
from hf_posenc.metrics.evaluation import evaluation_result, layer_distances, measure_schemes
from hf_posenc.metrics.forward import rounding
from hf_posenc.metrics.images.patches import PatchSize, cut, drawn_images, joined_patches, patch_outputs
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
    """Measures whether an image model distinguishes equal patches by their place, and what shuffled patches change.

    An image model has no causal mask, so without positions equal patches have equal states in every layer, and shuffled
    patches keep their states. Any difference comes from the scheme. The images are random pixels, because the question
    is about places, not about content.

    The model is left unchanged, also after an error.

    Args:
        model: a transformers model that reads only images, patched or not.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        grid: patches in each row and in each column of the image.
        steps: distances between the two equal patches, in patches.
        images: number of images to average over.
        seed: seed of the pixels, of the shuffle, and of newly created scheme weights.

    Returns:
        Records of these quantities, each a mean relative L2 distance:

        - `right` and `down`, by `step` and `layer` (0: the first layer's input): two equal patches in a row or column.
        - `shuffled`, by `layer`: the states of patches that have changed places. `whole`: the output for the image
          (logits, pooled output or class token), if there is one.
        - `sees_places`: passed if any of these is larger than rounding.

        If the model cannot take a scheme, the `error` of its subject has the reason.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        MeasurementError: if the grid is too small for the steps.
        UnsupportedError: if the model does not read only images, or merges its patches.
    """
    if images < 1 or not steps or min(steps) < 1 or max(steps) >= grid:
        raise MeasurementError(
            f"Two patches of a grid of {grid} are 1 to {grid - 1} patches apart, and at least one image is needed; got "
            f"steps={list(steps)} and images={images}."
        )
    size = PatchSize.of(model)
    drawn = cut(drawn_images(size, images, grid, grid, seed), size)
    order = torch.randperm(grid * grid, generator=torch.Generator().manual_seed(seed))
    shuffled = drawn.flatten(1, 2)[:, order].unflatten(1, (grid, grid))
    tolerance = rounding(next(model.parameters()).dtype)

    def measure(patched: Any) -> list[Record]:
        records = []
        for step in sorted(set(steps)):
            for name, (row, column) in (("right", (0, step)), ("down", (step, 0))):
                pair = drawn.clone()
                pair[:, row, column] = pair[:, 0, 0]
                states = patch_outputs(patched, joined_patches(pair)).states
                same = ((state[:, 0, 0], state[:, row, column]) for state in states)
                records += layer_distances(name, same, {"step": step}, count=images)
        before, after = (patch_outputs(patched, joined_patches(patches)) for patches in (drawn, shuffled))
        pairs = zip(before.states, after.states, strict=True)
        moved = ((state.flatten(1, 2)[:, order].flatten(0, 1), other.flatten(0, 2)) for state, other in pairs)
        records += layer_distances("shuffled", moved, count=images)
        if before.whole is not None and after.whole is not None:
            distance = float(relative_changes(before.whole, after.whole).mean())
            records.append(Record("", "whole", distance, count=images))
        largest = max(record.value or 0.0 for record in records)
        return [*records, Record("", "sees_places", passed=largest > tolerance)]

    return evaluation_result(
        "image_sensitivity",
        f": relative distances of patches, {grid} x {grid} in an image",
        model,
        measure_schemes(model, schemes, measure, seed=seed),
        (
            Quantity("right", "{step} right"),
            Quantity("down", "{step} down"),
            Quantity("shuffled", "shuffled"),
            Quantity("whole", "whole"),
            Quantity("sees_places", "sees places", style="verdict"),
        ),
        layers=1,
        settings={
            "grid": grid,
            "patch": [size.height, size.width],
            "images": images,
            "tolerance": tolerance,
            "seed": seed,
        },
        remarks=(_REMARK,),
    )


#: A dog and a cat of 8 x 8 pixels each.
DRAWINGS = {
    "dog": (
        "........",
        "##......",
        "###...#.",
        ".######.",
        ".######.",
        ".#.#.##.",
        ".#.#.#.#",
        "........",
    ),
    "cat": (
        "#.#.....",
        "###....#",
        "###....#",
        "..#####.",
        "..#####.",
        "..#.#.#.",
        "..#.#.#.",
        "........",
    ),
}
#: Patches along each side of a drawing.
SIDE = 2


def picture_of_two_dogs(rows: int, columns: int, first: tuple[int, int], second: tuple[int, int]) -> Tensor:
    """Draws a picture of two equal dogs and a cat, with 4 x 4 pixels per patch.

    Places are the row and the column of the upper left patch of a dog. Rows and columns are counted in patches.

    Returns:
        `(4 * rows, 4 * columns)` float32, 1 where there is ink. If there is room, it has a cat as further content.

    Raises:
        MeasurementError: if a dog leaves the picture, or the two overlap.
    """
    places = [first, second]
    if any(not (0 <= row <= rows - SIDE and 0 <= column <= columns - SIDE) for row, column in places):
        raise MeasurementError(
            f"Each dog takes {SIDE} x {SIDE} patches of a picture of {rows} x {columns}; got dogs at {first} and "
            f"{second}."
        )
    if _overlap(first, second):
        raise MeasurementError(f"The dogs at {first} and {second} overlap; they are {SIDE} x {SIDE} patches each.")
    scale = len(DRAWINGS["dog"]) // SIDE
    picture = torch.zeros(rows * scale, columns * scale)
    corners = itertools.product(range(rows - SIDE + 1), range(columns - SIDE + 1))
    free = [corner for corner in corners if not any(_overlap(corner, place) for place in places)]
    for name, (row, column) in [("dog", first), ("dog", second), *([("cat", free[-1])] if free else [])]:
        ink = torch.tensor([[mark == "#" for mark in line] for line in DRAWINGS[name]], dtype=torch.float32)
        top, left = row * scale, column * scale
        picture[top : top + len(ink), left : left + len(ink)] = ink
    return picture


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return all(abs(here - there) < SIDE for here, there in zip(first, second, strict=True))


def picture_dog_test(
    model: Any,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    grid: int = 8,
    first: Sequence[int] = (1, 1),
    second: Sequence[int] = (1, 5),
    seed: int = 0,
) -> Result:
    """Measures how different two equal dogs in one picture are in a model.

    The dogs are drawn in whole patches, so that the patches of both have the same pixels. Without positions, their
    states are exactly the same in every layer: equal patches attend to the same set of patches. Only the position
    encoding can make them differ. Unlike texts, pictures need no probe, because image models have no causal mask.

    The model is left unchanged, also after an error.

    Args:
        model: a transformers model that reads only images, patched or not.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        grid: patches in each row and in each column of the picture.
        first: row and column of the upper left patch of the first dog, which has two rows and two columns.
        second: row and column of the upper left patch of the second dog.
        seed: seed of newly created scheme weights.

    Returns:
        Records of these quantities:

        - `relative_l2` and `cosine`, by `layer` (0: the first layer's input): distance between the dogs' patch states.
        - `told_apart`: passed if any distance is larger than rounding (`settings["tolerance"]`).

        If the architecture cannot take a scheme, the `error` of its subject has the reason, and it has no records.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        MeasurementError: if a dog leaves the picture, or the dogs overlap.
        UnsupportedError: if the model does not read only images, or merges its patches.
    """
    for place in (first, second):
        if len(place) != 2:
            raise MeasurementError(f"A place is a row and a column; got {list(place)}.")
    (top, left), (other_top, other_left) = first, second
    picture = picture_of_two_dogs(grid, grid, (top, left), (other_top, other_left))
    size = PatchSize.of(model)
    pixels = functional.interpolate(picture[None, None], size.pixels(grid, grid), mode="nearest")
    # White paper and black ink, as pixels in [-1, 1].
    pixel_values = (1 - 2 * pixels).expand(-1, size.channels, -1, -1)

    def measure(patched: Any) -> list[Record]:
        dog, other = ((0, slice(row, row + SIDE), slice(column, column + SIDE)) for row, column in (first, second))
        states = patch_outputs(patched, pixel_values).states
        records, largest = distances_by_layer([(state[dog], state[other]) for state in states])
        return [*records, Record("", "told_apart", passed=largest > tolerance)]

    tolerance = rounding(next(model.parameters()).dtype)
    return evaluation_result(
        "picture_dog",
        ": how different two equal dogs in one picture are",
        model,
        measure_schemes(model, schemes, measure, seed=seed),
        distance_quantities("the two dogs", "states", "the input of the first layer"),
        views=(View(("relative_l2", "told_apart")),),
        layers=SHOWN_LAYERS,
        settings={
            "grid": grid,
            "patch": [size.height, size.width],
            "first": list(first),
            "second": list(second),
            "tolerance": tolerance,
            "seed": seed,
        },
    )
