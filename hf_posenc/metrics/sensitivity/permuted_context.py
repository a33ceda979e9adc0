"""What is lost when the words of the context stand in another order?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.sensitivity.material import TokenizedMaterial
from hf_posenc.metrics.sensitivity.outputs import Outputs, outputs_of, relative_changes


@dataclass(frozen=True)
class Permutation:
    """One way of shuffling.

    Args:
        within: tokens per block that is shuffled by itself; `None` for the whole context at once.
        output_change: mean relative L2 change of the output at the last token.
        loss_change: mean rise of the loss of the last token, in nats; `None` for a model without a language head.
    """

    within: int | None
    output_change: float
    loss_change: float | None


@dataclass(frozen=True)
class PermutedContext:
    """What shuffling the context does.

    Args:
        windows: how many windows of text the numbers are means of.
        context: tokens before the last one.
        loss: mean loss of the last token in the order of the text; `None` without a language head.
        permutations: one per way of shuffling.
    """

    windows: int
    context: int
    loss: float | None
    permutations: tuple[Permutation, ...]


def permuted_context(
    model: Any,
    tokens: TokenizedMaterial,
    *,
    causal: bool,
    context: int = 48,
    within: Sequence[int | None] = (None, 8),
    max_windows: int = 64,
    seed: int = 0,
) -> PermutedContext:
    """Shuffles all tokens before the last one, all together and in small blocks, and looks at the last one.

    A causal model predicts the token after the last; a masked one the last itself, which is masked. An encoder without
    positions does not change at all.

    Args:
        model: any transformers model.
        tokens: with the text to read.
        causal: whether a token sees only those before it.
        context: tokens before the last one.
        within: sizes of the blocks, `None` for the whole context.
        max_windows: at most so many windows, evenly spread over the text; they may overlap.
        seed: of the shuffles; the random state of the process is not touched.

    Raises:
        MeasurementError: if the text is shorter than one window, or a block is no block.
    """
    if context < 2 or any(size is not None and size < 2 for size in within):
        raise MeasurementError(f"At least 2 tokens can be shuffled; got context={context} and within={list(within)}.")
    length = context + 2
    if tokens.passage.shape[0] < length:
        raise MeasurementError(f"The text has {tokens.passage.shape[0]} tokens, and one window alone needs {length}.")
    count = min(max_windows, tokens.passage.shape[0] - length + 1)
    starts = torch.linspace(0, tokens.passage.shape[0] - length, count, dtype=torch.float64).long().tolist()
    windows = torch.stack([tokens.passage[start : start + length] for start in starts])
    text, targets = windows[:, :-1].clone(), windows[:, -1]
    if not causal:
        targets = text[:, -1].clone()
        if tokens.mask_token_id is not None:
            text[:, -1] = tokens.mask_token_id
    place = len(tokens.frame.before) + context

    def run(ids: Tensor) -> Outputs:
        return outputs_of(model, tokens.frame.around(ids, targets=False))

    def losses(outputs: Outputs) -> Tensor | None:
        if outputs.logits is None or (not causal and tokens.mask_token_id is None):
            return None
        return torch.nn.functional.cross_entropy(outputs.logits[:, place].float(), targets, reduction="none")

    before = run(text)
    loss = losses(before)
    permutations = []
    for size in within:
        generator = torch.Generator().manual_seed(seed)
        order = shuffled_order(context, context if size is None else size, count, generator)
        shuffled = torch.cat([text[:, :-1].gather(1, order), text[:, -1:]], dim=1)
        after = run(shuffled)
        changed = losses(after)
        permutations.append(
            Permutation(
                within=size,
                output_change=float(relative_changes(before.last[:, place], after.last[:, place]).mean()),
                loss_change=None if loss is None or changed is None else float((changed - loss).mean()),
            )
        )
    return PermutedContext(count, context, None if loss is None else float(loss.mean()), tuple(permutations))


def shuffled_order(length: int, block: int, rows: int, generator: torch.Generator) -> Tensor:
    """`(rows, length)` int64: a random permutation of each block of indices, another one in every row."""
    keys = torch.rand(rows, length, generator=generator) + torch.arange(length) // block
    return keys.argsort(dim=1)
