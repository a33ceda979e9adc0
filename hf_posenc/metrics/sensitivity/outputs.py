"""What a model makes of a batch of sentences, and how far two such things are apart."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.metrics.language_modeling.capacity import native_capacity
from hf_posenc.metrics.preserve import evaluation_mode

#: Tokens per forward call: every layer's states are kept.
_TOKENS_PER_BATCH = 2048


@dataclass(frozen=True)
class Outputs:
    """Of a batch.

    Args:
        states: each `(batch, length, hidden)` on the CPU: embeddings first, then every layer.
        logits: `(batch, length, vocabulary)` on the CPU, or `None` for a model without any for each token.
    """

    states: tuple[Tensor, ...]
    logits: Tensor | None

    @property
    def last(self) -> Tensor:
        """The logits, or else the states behind the last layer."""
        return self.states[-1] if self.logits is None else self.logits


def outputs_of(
    model: Any, input_ids: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> Outputs:
    """Runs a model, or the encoder of an encoder-decoder, in evaluation mode.

    Args:
        model: any transformers model.
        input_ids: `(batch, length)`.
        attention_mask: the same shape; by default all ones.
        position_ids: the same shape; by default the model's own.

    Raises:
        SequenceLengthError: if the model has no positions for so long a sequence.
        UnsupportedError: if it returns no hidden states, or takes no position_ids.
    """
    needed = input_ids.shape[1] if position_ids is None else int(position_ids.max()) + 1
    capacity = native_capacity(model)
    if capacity is not None and needed > capacity:
        raise SequenceLengthError(f"Position {needed - 1} lies past the {capacity} positions of the position table.")
    stack = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
    accepted = inspect.signature(stack.forward).parameters
    if position_ids is not None and "position_ids" not in accepted:
        raise UnsupportedError(f"{type(stack).__name__} takes no position_ids.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    options = {"use_cache": False} if "use_cache" in accepted else {}
    device = model.get_input_embeddings().weight.device
    rows = max(1, _TOKENS_PER_BATCH // input_ids.shape[1])
    parts: list[Outputs] = []
    with evaluation_mode(model):
        for start in range(0, input_ids.shape[0], rows):
            batch = slice(start, start + rows)
            placed = {} if position_ids is None else {"position_ids": position_ids[batch].to(device)}
            output = stack(
                input_ids=input_ids[batch].to(device),
                attention_mask=mask[batch].to(device),
                output_hidden_states=True,
                return_dict=True,
                **placed,
                **options,
            )
            states = getattr(output, "hidden_states", None)
            if not states:
                raise UnsupportedError(f"{type(stack).__name__} returns no hidden states, which are compared here.")
            logits = getattr(output, "logits", None)
            if logits is not None and logits.shape[:2] != input_ids[batch].shape:
                logits = None
            parts.append(Outputs(tuple(state.cpu() for state in states), None if logits is None else logits.cpu()))
    return Outputs(
        tuple(torch.cat(states) for states in zip(*(part.states for part in parts), strict=True)),
        None if parts[0].logits is None else torch.cat([part.logits for part in parts if part.logits is not None]),
    )


def relative_changes(first: Tensor, second: Tensor) -> Tensor:
    """`metrics.distance.relative_l2` row by row: `(batch, ...)`, twice -> `(batch,)` float64."""
    first, second = (values.double().flatten(start_dim=1) for values in (first, second))
    scale = (first.norm(dim=1) + second.norm(dim=1)) / 2
    return torch.where(scale == 0, 0.0, (first - second).norm(dim=1) / scale)
