"""What a model makes of one sentence."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.metrics.distance import relative_l2
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.words import TokenizedPair


def sentence_embeddings(model: Any, input_ids: Tensor) -> Tensor:
    """The token embeddings of one sentence, without positions, `(length, hidden)` on the CPU.

    Read from the table, not by calling its module, because a patch may add positions there.

    Raises:
        MeasurementError: if a token id lies outside the table, so that the tokenizer belongs to another model.
    """
    table = model.get_input_embeddings()
    rows = table.weight.shape[0]
    if int(input_ids.max()) >= rows:
        raise MeasurementError(
            f"The tokenizer gave the token id {int(input_ids.max())}, but the model has {rows} embeddings. "
            f"Use the tokenizer that belongs to this model."
        )
    with torch.no_grad():
        vectors = table.weight[input_ids[0].to(table.weight.device)].cpu()
        return vectors * torch.as_tensor(getattr(table, "embed_scale", 1.0)).cpu()


def hidden_states(model: Any, input_ids: Tensor) -> tuple[Tensor, ...]:
    """The hidden states of one sentence, each `(length, hidden)`: embeddings first, then every layer.

    Raises:
        UnsupportedError: if the model returns none.
    """
    stack = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
    device = model.get_input_embeddings().weight.device
    ids = input_ids.to(device)
    options: dict[str, Any] = {"output_hidden_states": True, "return_dict": True}
    accepted = inspect.signature(stack.forward).parameters
    options |= {
        name: value
        for name, value in {"attention_mask": torch.ones_like(ids), "use_cache": False}.items()
        if name in accepted
    }
    states = getattr(stack(input_ids=ids, **options), "hidden_states", None)
    if not states:
        raise UnsupportedError(
            f"{type(stack).__name__} returns no hidden states, which the dog test compares. Use a model whose forward "
            f"takes output_hidden_states=True, or `AttentionProbe` on its embeddings."
        )
    return tuple(state[0] for state in states)


def is_causal(model: Any, pair: TokenizedPair) -> bool:
    """Whether the tokens up to the first occurrence are blind to all that follows, as measured."""
    last = pair.first[-1]
    other = pair.input_ids.clone()
    tail = other[0, last + 1 :]
    # Other tokens, not another order: a bidirectional model without positions does not see order.
    first = int(other[0, 0])
    other[0, last + 1 :] = first if bool((tail != first).any()) else first + 1
    before, after = (hidden_states(model, ids)[-1][: last + 1] for ids in (pair.input_ids, other))
    return relative_l2(before, after) <= rounding(before.dtype)


def rounding(dtype: torch.dtype) -> float:
    """Distances up to this one are rounding."""
    return max(1e-5, torch.finfo(dtype).eps)
