"""What decoding steps reuse: values that follow from weights, and distance biases of twice the current length."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.forms import DistanceForm
from hf_posenc.patching.call.cache_notes import note_of, set_note
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.positions import KeptValues

_NAME = "_hf_posenc_kept"


def keep_values(state: ForwardState) -> None:
    """Gives a call the values that are a note about its cache, unless they would be part of a graph."""
    cache = state.cache_object
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    kept: KeptValues | None = note_of(cache, _NAME)
    if kept is None:
        kept = KeptValues()
        set_note(cache, _NAME, kept)
    state.memo[KeptValues] = kept


def cached_row(bias: DistanceBias, state: ForwardState, key_length: int) -> DistanceForm | None:
    """The bias of a single query that is the newest token, reusing values computed in an earlier decoding step.

    Returns:
        `None` if values cannot be stored: with gradients, in a compiled graph, without a cache, or if there are keys
        after the query, as in a static cache.
    """
    kept: KeptValues | None = state.memo.get(KeptValues)
    if kept is None or torch.is_grad_enabled() or not isinstance(state.offset, int) or key_length > state.offset + 1:
        return None

    def compute() -> Tensor:
        return state.own(bias)(torch.arange(1 - 2 * key_length, 1, device=state.device)).contiguous()

    values = kept.of(bias, f"bias on {state.device}", compute, lambda known: known.shape[-1] >= key_length)
    row = values[:, values.shape[-1] - key_length :]
    return DistanceForm(row, 1, key_length, state.own(bias).slopes_behind(row.device))
