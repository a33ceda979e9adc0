"""Checks that refuse a cache, or packed rows, that a part cannot encode correctly."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.grid_state import GridTokens
from hf_posenc.schemes.needs import needs_of
from hf_posenc.schemes.parts import Part
from hf_posenc.schemes.positions import exporting, require
from hf_posenc.schemes.refusals import PACKED_ROWS

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
        PACKED_ROWS.refuse(needs_of([part]), "this scheme")
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


def negative_positions(state: ForwardState, ids: Tensor, first: int = 0) -> Tensor | None:
    """0-dim bool: whether the caller gave a real token a position before the first one, which is that of padding.

    `None` if no positions were given, or the mask does not show which tokens are real. Padding of a grid has no mask.
    """
    if state.position_ids is None or state.mask_hides_padding or isinstance(state, GridTokens):
        return None
    counted = state.mask_positions()
    before = ids < first
    return (before if counted is None else before & (counted.to(ids.device) >= 0)).any()


def refuse_negative(state: ForwardState, ids: Tensor, offset: int) -> None:
    """Refuses positions of real tokens for which a table with `offset` rows before position 0 has no row.

    Raises:
        SequenceLengthError: an `IndexError`, as stock raises.
    """
    if torch.jit.is_tracing() or ids.is_meta:
        return
    if not torch.compiler.is_compiling() and ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    negative = negative_positions(state, ids, -offset)
    if negative is not None:
        require(~negative, NEGATIVE)


def in_dtype(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors of positions in the dtype of a model.

    Raises:
        SequenceLengthError: if they do not fit float16.
    """
    cast = encoded.to(dtype)
    if dtype == torch.float16 and not torch.jit.is_tracing() and not cast.is_meta:
        require(
            cast.isfinite().all(),
            "The vectors of these positions grow beyond the range of float16 (65504). Use bfloat16 or float32, a "
            "shorter sequence, or a smaller scale.",
        )
    return cast


NEGATIVE = (
    "The position_ids of this call give tokens a position before the first one. If the stock table begins at a later "
    "row (RoBERTa's at padding_idx + 1), so do its position_ids. Leave position_ids out, or give each token that the "
    "mask shows a position from the first one on. `generate` counts from 0 unless it is given position_ids."
)


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
