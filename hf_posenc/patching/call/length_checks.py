"""Checks that refuse a cache, or packed rows, that a part cannot encode correctly."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.grid_state import GridTokens
from hf_posenc.schemes.parts import Part
from hf_posenc.schemes.positions import exporting

#: A length that no sequence reaches.
_FARTHEST = 2**31


def check_cache(part: Part, state: ForwardState) -> None:
    """Refuses packed rows, caches and tokens without a place that a part cannot encode.

    Raises:
        UnsupportedError: if the part refuses the cache, or if it depends on the length of the sequence and a row holds
            several documents.
    """
    if isinstance(state, GridTokens):
        state.check_places(part)
        return
    if part.length_dependent and not torch.compiler.is_compiling() and _is_packed(state):
        raise UnsupportedError(
            "position_ids restart within a row (packed documents), but this scheme depends on the length of the "
            "sequence, and a packed row holds several sequences. Pass the documents as separate rows."
        )
    if state.offset is None or type(part).check_cache is Part.check_cache:
        return
    grows_with_care = part.length_dependent or part.needs_whole_sequence
    if torch.compiler.is_compiling() and isinstance(state.offset, Tensor) and not grows_with_care:
        # Reading the length would break the graph of compiled decoding. The other parts that refuse a cache draw random
        # positions in training, where a compiled static cache is not used.
        return
    if exporting():
        _check_cache_of_program(part, state)
        return
    cached = int(state.offset)
    if cached > 0:
        part.check_cache(cached, cached + state.query_length)


def _check_cache_of_program(part: Part, state: ForwardState) -> None:
    """Refuses a part whose cache is wrong at some length, because an exported program cannot check its lengths."""
    if isinstance(state.offset, int) and state.offset == 0:
        return
    try:
        part.check_cache(1, _FARTHEST)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"An exported program does not check the length of its cache, and this scheme cannot use a cache at every "
            f"length. {error}"
        ) from None


def _is_packed(state: ForwardState) -> bool:
    """Whether positions decrease between two adjacent real tokens of a row."""
    ids, mask = state.position_ids, state.attention_mask
    if ids is None:
        return False
    restarts = ids.diff(dim=-1) < 0
    if mask is not None and mask.shape[1] >= ids.shape[1]:
        real = mask[:, -ids.shape[1] :].bool().to(ids.device)
        restarts = restarts & real[:, 1:] & real[:, :-1]
    return bool(restarts.any())
