"""The dog test for pictures: do two equal dogs in one picture differ for the model?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.forward import rounding
from hf_posenc.metrics.images.patches import PatchSize, patch_outputs
from hf_posenc.metrics.in_turn import check_schemes, measure_in_turn
from hf_posenc.metrics.statistics import cosine_distance, relative_l2, spread
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig

#: A dog and a cat in pixels, 8 x 8 each.
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
#: Layers that the table shows; the result has all of them.
_SHOWN_LAYERS = 8


def picture_of_two_dogs(rows: int, columns: int, first: tuple[int, int], second: tuple[int, int]) -> Tensor:
    """A picture with two equal dogs and a cat, drawn in 4 x 4 pixels per patch.

    Args:
        rows: of patches.
        columns: of patches.
        first: row and column of the upper left patch of the first dog.
        second: the same of the second dog.

    Returns:
        `(4 * rows, 4 * columns)` float32, 1 where there is ink. The cat stands where there is room, if there is any, so
        that the picture has more in it than the dogs.

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
    free = [
        (row, column)
        for row in range(rows - SIDE + 1)
        for column in range(columns - SIDE + 1)
        if not any(_overlap((row, column), place) for place in places)
    ]
    for name, (row, column) in [("dog", first), ("dog", second), *([("cat", free[-1])] if free else [])]:
        ink = torch.tensor([[mark == "#" for mark in line] for line in DRAWINGS[name]], dtype=torch.float32)
        top, left = row * scale, column * scale
        picture[top : top + len(ink), left : left + len(ink)] = ink
    return picture


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return all(abs(here - there) < SIDE for here, there in zip(one, other, strict=True))


def picture_dog_test(
    model: Any,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    grid: int = 8,
    first: Sequence[int] = (1, 1),
    second: Sequence[int] = (1, 5),
    seed: int = 0,
) -> Result:
    """Measures how far apart a model holds two equal dogs in one picture.

    The dogs are drawn in whole patches, so that the patches of both have the same pixels. A model without positions
    holds them for exactly the same in every layer: equal patches attend to the same set of patches. What sets them
    apart is the position encoding, and nothing else. No probe is needed as for texts, because models of images have no
    causal mask.

    The model is left as it was found, also after an error.

    Args:
        model: a transformers model of images alone, patched or not.
        schemes: what is measured, one after the other; see `measure_in_turn`.
        grid: patches in a row and in a column of the picture.
        first: row and column of the first dog's upper left patch; a dog takes two rows and two columns.
        second: the same of the second dog.
        seed: of newly created scheme weights.

    Returns:
        Records of these quantities:

        - `relative_l2` and `cosine`, by `layer` (0: the input of the first layer): distance of the states of all
          patches of the one dog from those of the other.
        - `told_apart`: passed if any distance is larger than rounding (`settings["tolerance"]`).

        A scheme that the architecture cannot take has the reason in its subject's `error`, and no records.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is touched.
        MeasurementError: if a dog leaves the picture, or the dogs overlap.
        UnsupportedError: if the model is not one of images alone, or merges its patches.
    """
    check_schemes(schemes)
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
        records = []
        for layer, state in enumerate(patch_outputs(patched, pixel_values).states):
            dogs = [state[0, row : row + SIDE, column : column + SIDE] for row, column in (first, second)]
            records += [
                Record("", name, distance(*dogs), {"layer": layer})
                for name, distance in (("relative_l2", relative_l2), ("cosine", cosine_distance))
            ]
        largest = max(one.value or 0.0 for one in records if one.quantity == "relative_l2")
        return [*records, Record("", "told_apart", passed=largest > tolerance)]

    tolerance = rounding(next(model.parameters()).dtype)
    subjects, records = measure_in_turn(model, schemes, measure, seed=seed)
    layers = list(dict.fromkeys(record.at["layer"] for record in records if "layer" in record.at))
    return Result(
        task="picture_dog",
        title=f"{type(model).__name__}: how different two equal dogs in one picture are",
        quantities=(
            Quantity(
                "relative_l2",
                "layer {layer}",
                "layer: distance between the model's states of the two dogs, as a share of their length; layer 0 is "
                "the input of the first layer.",
            ),
            Quantity("cosine", "layer {layer}, cosine"),
            Quantity("told_apart", "apart", "apart: whether positions tell the two dogs apart.", style="verdict"),
        ),
        subjects=subjects,
        records=records,
        views=(View(("relative_l2", "told_apart"), shown={"layer": spread(layers, _SHOWN_LAYERS)}),),
        settings={
            "model": type(model).__name__,
            "grid": grid,
            "patch": [size.height, size.width],
            "first": list(first),
            "second": list(second),
            "tolerance": tolerance,
            "seed": seed,
        },
    )
