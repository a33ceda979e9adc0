"""A distance bias during decoding: evaluated once for twice the current length and reused in later steps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.forms import DistanceForm
from hf_posenc.patching.call.cache_notes import note_of, set_note
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.schemes.parts import DistanceBias

_NAME = "_hf_posenc_biases"


class _Biases(dict[int, tuple[Any, Tensor]]):
    """Biases by the id of their part. Not included when the cache is copied or pickled."""

    def __reduce__(self) -> tuple[type[_Biases], tuple[()]]:
        return _Biases, ()


def cached_row(bias: DistanceBias, state: ForwardState, key_length: int) -> DistanceForm | None:
    """The bias of a single query that is the newest token, reusing values computed in an earlier decoding step.

    The values are a note about the cache, and recomputed if a weight of the bias has been replaced or written to.

    Args:
        bias: the scheme's part.
        state: of the call.
        key_length: number of keys, the query's own included.

    Returns:
        `None` if values cannot be stored: with gradients, in a compiled graph, without a cache, or if there are keys
        after the query, as in a static cache.
    """
    cache, offset, device = state.cache_object, state.offset, state.device
    if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(offset, int):
        return None
    if key_length > offset + 1:
        return None
    biases: _Biases | None = note_of(cache, _NAME)
    if biases is None:
        biases = _Biases()
        set_note(cache, _NAME, biases)
    # The numbers change whenever a weight is replaced or written to.
    weights = tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in bias.parameters())
    # A weak reference: a cache may outlive the model.
    written = (weakref.ref(bias), device, weights)
    known = biases.get(id(bias))
    if known is None or known[0] != written or known[1].shape[-1] < key_length:
        reach = 2 * key_length
        known = written, state.own(bias)(torch.arange(1 - reach, 1, device=device))
        biases[id(bias)] = known
    values = known[1][:, known[1].shape[-1] - key_length :]
    return DistanceForm(values, 1, key_length, state.own(bias).slopes_behind(values.device))
