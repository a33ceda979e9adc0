"""Other positions for the same tokens: the chunks of a text stand further apart, or in another order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.errors import SequenceLengthError, UnknownNameError
from hf_posenc.recipes.position_views import document_starts

#: How `perturbed_positions` are drawn: those of a suffix are increased, or all are rotated.
SHIFTS = ("skip", "cyclic")


def pose_positions(
    positions: Tensor,
    target_length: int,
    *,
    chunks: int = 2,
    real: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws positions of a longer text for the tokens of a short one (PoSE, arXiv:2309.10400, section 3.2).

    A document of `L` tokens is cut into chunks. Chunk `i` moves by `u[i]`, where `u[0] = 0` and `u[i]` is uniform in
    `u[i-1] .. target_length - L`, so positions increase and stay below `target_length`. Documents are runs of
    consecutive positions, and each is drawn separately. The chunks hold the consecutive tokens of the document (the
    paper's `v[i] = 0`; its other choices give nearly the same losses).

    The paper does not state how long the chunks are. As in the authors' code, the first of two has 1 to `L / 2` tokens,
    rounded up. With more chunks, each has 1 to an equal share of the rest, which is a choice made here.

    Give the model an attention mask too: without one, transformers treats every skip as the start of another document.

    Args:
        positions: `(batch, length)` int64, the standard positions.
        target_length: the number of positions to train for.
        chunks: the number of chunks. The paper recommends 2.
        real: `(batch, length)`, false or 0 for padding, which keeps its positions. All by default.
        generator: for the draws, on the CPU. By default the global one, whose state a checkpoint of `Trainer` contains.

    Returns:
        `(batch, length)` int64.

    Raises:
        ValueError: for positions or a mask of another shape, fewer than two chunks, or a document longer than
            `target_length`.
    """
    if chunks < 2:
        raise ValueError(f"chunks is {chunks!r}; expected 2 or more: the first chunk stays where it is.")
    real, inner, size, drawn = _documents(positions, real, 2 * (chunks - 1), generator)
    longest = int(size.where(real, 0).amax()) if size.numel() else 0
    if not longest <= target_length:
        raise ValueError(
            f"target_length is {target_length}, and a document has {longest} tokens; expected at least as many "
            "positions as tokens, and more of them for any skip."
        )
    moved, cut, skipped = positions, torch.zeros_like(size), torch.zeros_like(size)
    for left in range(chunks, 1, -1):
        share = (size - cut + left - 1).clamp(min=0) // left
        cut = cut + 1 + (drawn[left - 2] * share).long()
        skip = (drawn[left - 2 + chunks - 1] * (target_length - size - skipped + 1)).long()
        skipped, moved = skipped + skip, moved + skip * (inner >= cut)
    return moved.where(real, positions)


def perturbed_positions(
    positions: Tensor,
    *,
    shift: str = "skip",
    largest_skip: int | None = None,
    limit: int | None = None,
    real: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws other positions for the same tokens (arXiv:2604.14339, section 2).

    A document is a run of consecutive positions. Each is perturbed separately, so the documents of a packed row stay
    apart. With `L` tokens in a document:

    - "skip": token `i` keeps its position for `i < s`, and has its position plus `y` for `i >= s`. `s` is uniform in
      `0..L-1` and `y` in `1..Y`. As in the paper, `Y` is `L` unless `largest_skip` is given.
    - "cyclic": token `i` has the position of token `(i + u) mod L`. The range of `u` is a choice made here: uniform in
      `1..L-1`. A document of one token keeps its position.

    Both keep the order of the tokens within each of the two segments.

    Args:
        positions: `(batch, length)` int64, the standard positions.
        shift: "skip" (the paper's main variant) or "cyclic".
        largest_skip: `Y` in positions, for "skip".
        limit: the number of positions of the model. All positions returned are below it, if all given are.
        real: `(batch, length)`, false or 0 for padding, which keeps its positions. All by default.
        generator: for the draws, on the CPU. By default the global one, whose state a checkpoint of `Trainer` contains.

    Returns:
        `(batch, length)` int64.

    Raises:
        ValueError: for positions or a mask of another shape, or a `largest_skip` below 1.
        SequenceLengthError: for documents that leave no room for a skip below `limit`.
        UnknownNameError: for an unknown shift.
    """
    check_shift(shift, largest_skip)
    real, inner, size, (boundary, amount) = _documents(positions, real, 2, generator)
    if shift == "cyclic":
        turn = torch.where(size > 1, 1 + (amount * (size - 1)).long(), 0)
        moved = positions - inner + (inner + turn) % size
    else:
        largest = size if largest_skip is None else torch.full_like(size, largest_skip)
        if limit is not None:
            room = limit - positions - (size - inner)
            if bool(((room < 1) & real).any()):
                longest = int(positions.where(real, -1).max()) + 1
                raise SequenceLengthError(
                    f"The positions reach {longest} and the model has {limit}, so no token can be moved further away. "
                    f"Train on rows of fewer than {limit} tokens, give the model more positions, or use "
                    "shift='cyclic', which stays within the positions of a row."
                )
            largest = largest.minimum(room)
        skip = 1 + (amount * largest).long()
        moved = positions + skip * (inner >= (boundary * size).long())
    return moved.where(real, positions)


def check_shift(shift: str, largest_skip: int | None, owner: str = "") -> None:
    """Raises for options of `perturbed_positions` that do not exist."""
    if shift not in SHIFTS:
        raise UnknownNameError("shift", str(shift), SHIFTS)
    if largest_skip is not None and largest_skip < 1:
        raise ValueError(f"{owner}largest_skip is {largest_skip!r}; expected 1 or more.")


def _documents(
    positions: Tensor, real: Tensor | None, numbers: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The documents of rows.

    Returns:
        Of each token, `(batch, length)`: whether it is real, its distance from the first token of its document, and the
        number of tokens in the document; and `numbers` random numbers below 1 of each document,
        `(numbers, batch, length)` float64.

    Raises:
        ValueError: for positions and masks of another dtype or shape.
    """
    if positions.dim() != 2 or positions.is_floating_point():
        raise ValueError(
            f"positions are {positions.dtype} of shape {tuple(positions.shape)}; expected integers, (batch, length)."
        )
    real = torch.ones_like(positions, dtype=torch.bool) if real is None else real.bool()
    if real.shape != positions.shape:
        raise ValueError(
            f"real has the shape {tuple(real.shape)}, and positions have {tuple(positions.shape)}; expected the same "
            "shape, 1 at real tokens and 0 at padding, such as an attention mask."
        )
    batch, length = positions.shape
    slots = torch.arange(length, device=positions.device).expand_as(positions)
    starts = document_starts(positions, real)
    first = slots.where(starts, 0).cummax(-1).values
    # The slot after the last token of a document: the nearest start behind it.
    starts_behind = functional.pad(slots.where(starts, length)[:, 1:], (0, 1), value=length)
    size = starts_behind.flip(-1).cummin(-1).values.flip(-1) - first
    # In float64 the product with a size is never rounded up to the size.
    drawn = torch.rand(numbers, batch, length, generator=generator, dtype=torch.float64).to(positions.device)
    return real, slots - first, size, drawn.gather(-1, first.expand(numbers, -1, -1))
