"""Refusing caches, packed rows and positions that a scheme cannot encode correctly.

The scheme with which the tokens of a cache were encoded is a note about the cache. Keys of another scheme usually have
the same shape, so only this note shows that they do not fit. A cache with tokens but without a scheme was filled before
the model was patched, or was put together by other code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from hf_posenc.attention.block_attention import without_autocast
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache import (
    CachedPositions,
    cached_length,
    caches_with,
    counted_tokens,
    note_of,
    record,
    recorded,
    remember_keys,
    self_attention_cache,
    set_note,
)
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.schemes import NoneConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.needs import needs_of
from hf_posenc.schemes.parts import AdditiveEncoding, Part
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.refusals import PACKED_ROWS
from hf_posenc.schemes.weights import exporting, require, traced

#: The name of the note.
SCHEME = "_hf_posenc_scheme"
#: Takes the place of the scheme of an accepted cache, which any patched model may continue.
_ACCEPTED = "accepted"


def accept_cache(cache: Any, position_ids: Tensor | None = None) -> None:
    """States that the keys in a cache suit the scheme of the patched model that continues it, and their positions.

    A patched model refuses a cache with tokens that it did not encode: one that was filled before the patch, put
    together from stored tensors, or merged from others. It also refuses a cache from which tokens were dropped or in
    which they were moved, if its scheme needs their positions. If the keys were computed with this scheme, this
    function makes the cache usable. `grape_m` and `selective_rope` rotate keys by sums over all earlier tokens, so they
    refuse it nevertheless if `position_ids` skip any.

    Args:
        cache: the cache, in its present state.
        position_ids: `(batch or 1, length)`, the position of each cached token; `None` if they are 0, 1, 2, ... (or
            counted over the attention mask). Calls that continue the cache must then pass `position_ids` too.

    Raises:
        ValueError: if the cache holds another number of tokens.
        TypeError: if the positions are not a tensor of integers.
        UnsupportedError: for a cache without a length, or whose type does not allow attributes.
    """
    keeper = self_attention_cache(cache)
    length = cached_length(keeper)
    if length is None or getattr(keeper, "__dict__", None) is None:
        raise UnsupportedError(
            f"A {type(cache).__name__} does not report its length, or cannot store a note about its keys. Use one of "
            "transformers' cache classes."
        )
    if position_ids is not None and (not isinstance(position_ids, Tensor) or position_ids.is_floating_point()):
        raise TypeError("position_ids must be a tensor of integers: (batch or 1, length).")
    if position_ids is not None and position_ids.shape[-1:] != (int(length),):
        raise ValueError(
            f"position_ids have the shape {tuple(position_ids.shape)}, but the cache holds {int(length)} tokens. Give "
            "one position for each of them: (batch or 1, length)."
        )
    ids = None if position_ids is None else position_ids.long().view(-1, int(length))
    record(keeper, CachedPositions(length, ids, by_next_mask=ids is None))
    remember_keys(keeper)
    set_note(keeper, SCHEME, _ACCEPTED)


def refuse_tensors(arguments: dict[str, Any], scheme: SchemeConfig) -> None:
    """Refuses keys in tuples, as code for transformers before version 5 passes them, unless no token has a position.

    Their axis of tokens differs between models.
    """
    for name, value in arguments.items():
        first = value[0] if isinstance(value, tuple | list) and value else None
        holds = isinstance(first, tuple | list) and first and isinstance(first[0], Tensor)
        if holds and ("past" in name or "cache" in name) and scheme != NoneConfig():
            raise UnsupportedError(
                f"The argument {name} of this call is a {type(value).__name__} of tensors. It does not show how many "
                f"tokens it holds, so {scheme.name!r} cannot continue it. Pass a transformers.DynamicCache if the code "
                "of the model accepts one, or the whole sequence with use_cache=False."
            )


def refuse_unknown_tokens(state: ForwardState, queries: int, keys: int, attention: nn.Module) -> None:
    """Refuses more queries than the tokens of a call, or more keys than these and its cache, in other code.

    Args:
        state: the state of the call.
        queries: number of queries.
        keys: number of keys.
        attention: the attention module.
    """
    compares = f"{type(attention).__name__} compares {queries} queries with {keys} keys"
    if queries > state.query_length:
        raise UnsupportedError(
            f"{compares} in a call with {state.query_length} tokens in a row, so their positions are unknown: it "
            "merges rows of the batch, or has queries that are no tokens. Compute the attention of each row on its "
            "own, with heads of the shape (batch, heads, length, head_dim)."
        )
    layer = plain_layer(state.cache_object, getattr(attention, "layer_idx", None) or 0)
    stored = getattr(layer, "keys", None)
    known = max(state.end or keys, stored.shape[-2] if isinstance(stored, Tensor) and stored.dim() == 4 else 0)
    if isinstance(state.offset, int) and keys > known and (state.cache_object is None or layer is not None):
        raise UnsupportedError(
            f"{compares}, but its call and a transformers Cache have {known} tokens. The positions of the other keys "
            "are unknown: they are learned, or cached in the module or in an object that is not a transformers Cache. "
            "Use a transformers.DynamicCache or the whole sequence, and no keys that are no tokens."
        )


def rotates_cached_keys(attention: nn.Module) -> UnsupportedError:
    """The error for an attention module of other code that rotates other tokens than those of the call."""
    return UnsupportedError(
        f"{type(attention).__name__} rotates keys after it has cached them, and the scheme rotates them before. Rotate "
        "keys before the cache is updated, as transformers' own classes do, or call the model with use_cache=False."
    )


def plain_layer(cache: Any, layer_idx: int = 0, *_: Any, **__: Any) -> Any:
    """The layer of a cache that keeps every key in its slot, or its class before it is made; `None` for other caches.

    Offloaded keys may be on their way to the device.
    """
    keeper = self_attention_cache(cache)
    if not isinstance(keeper, Cache) or type(keeper).update is not Cache.update or keeper.offloading:
        return None
    is_made = layer_idx < len(keeper.layers)
    layer = keeper.layers[layer_idx] if is_made else keeper.layer_class_to_replicate
    update = getattr(type(layer) if is_made else layer, "update", None)
    return layer if update in (DynamicLayer.update, StaticLayer.update) else None


def is_accepted(cache: Any) -> bool:
    """Whether a cache was accepted, and no call has continued it since."""
    return note_of(self_attention_cache(cache), SCHEME) is _ACCEPTED


def check_cached_scheme(cache: Any, scheme: SchemeConfig) -> None:
    """Refuses a cache whose tokens were encoded with another scheme, or by no patched model."""
    if traced():
        return
    keeper = self_attention_cache(cache)
    known = note_of(keeper, SCHEME)
    if known is scheme or getattr(keeper, "__dict__", None) is None:
        return
    if known == scheme or known is _ACCEPTED:
        guard = vars(keeper).get("update")
        if isinstance(guard, _RefusedInStock):
            guard.lift()
        return
    # A static cache is emptied and used again. Its length is read only here, because that waits for a GPU.
    length = cached_length(keeper)
    if length is None or int(length) == 0:
        return
    if known is None:
        raise UnsupportedError(
            f"The cache holds {int(length)} tokens that were not encoded with {scheme.name!r} by a patched model: it "
            "was filled before the model was patched, or put together from tensors. Start with a new cache. If its "
            "keys were computed with this scheme, call hf_posenc.accept_cache(cache, position_ids) first."
        )
    raise UnsupportedError(
        f"The cache holds {int(length)} tokens that were encoded with {known.name!r}, and this model now has "
        f"{scheme.name!r}{' with other options' if known.name == scheme.name else ''}. Their keys cannot be used with "
        "this scheme. Start with a new cache."
    )


def refuse_in_stock(scheme: SchemeConfig) -> None:
    """Makes the caches that a scheme has filled refuse tokens of the stock model, once the scheme has been removed."""
    for cache in caches_with(SCHEME, scheme):
        if not isinstance(vars(cache).get("update"), _RefusedInStock):
            cache.update = _RefusedInStock(cache, scheme.name, vars(cache).get("update"))
            # A model that gets the scheme again checks the cache again.
            set_note(cache, SCHEME, copy.copy(scheme))


class _RefusedInStock:
    """Stands in for the `update` of a cache whose scheme has been removed from the model."""

    def __init__(self, cache: Any, name: str, inner: Any) -> None:
        self.cache = cache
        self.name = name
        self.inner = inner

    def lift(self) -> None:
        """Gives the cache its own `update` back."""
        if self.inner is None:
            del self.cache.update
        else:
            self.cache.update = self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the cache if it has been emptied."""
        length = int(cached_length(self.cache) or 0)
        if length:
            raise UnsupportedError(
                f"The cache holds {length} tokens that were encoded with {self.name!r}, which has been removed from "
                "the model. Their keys cannot be used with the stock model. Start with a new cache."
            )
        self.lift()
        return self.cache.update(*args, **kwargs)


#: A length that no sequence reaches.
_FARTHEST = 2**31


def check_cache(part: Part, state: ForwardState) -> None:
    """Refuses packed rows, caches and tokens without a place that a part cannot encode."""
    if state.of_grid:
        if part.reads_coordinates and (state.placed is None or state.placed.coordinates is None):
            raise UnsupportedError(
                f"{type(part).__name__} reads the rows and columns of patches, but a layer of this model computes "
                f"attention over {state.query_length} tokens that are not the patches of an image: they belong to "
                "another axis (frames), or their order is unknown. Use a one-dimensional scheme (axes=1, 'rope'), or "
                "choose layers with `layers=`."
            )
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
        # A program cannot check its lengths.
        starts = isinstance(state.offset, int) and state.offset == 0
        refused = None if starts else _refused_growth(part, _FARTHEST)
        if refused is not None:
            raise UnsupportedError(
                "An exported program does not check the length of its cache, and this scheme cannot use a cache at "
                f"every length. {refused}"
            )
        return
    cached = int(state.offset) + state.dropped
    if cached > 0:
        total = cached + state.query_length
        # The lengths of rows are on the device, and are not read for a text that is short enough for all of them.
        reads = part.length_dependent and not (state.position_ids is None and _refused_growth(part, total) is None)
        for before, after in (_lengths_of_rows(state) if reads else None) or [(cached, total)]:
            part.check_cache(before, after)


def _refused_growth(part: Part, length: int) -> UnsupportedError | None:
    """The error of a cache that grows from one token to `length`; `None` if it may between all lengths in between."""
    try:
        part.check_cache(1, length)
    except UnsupportedError as error:
        return error
    return None


def _lengths_of_rows(state: ForwardState) -> list[tuple[int, int]] | None:
    """The length of each sequence before and after a call, which differ from the slots with padding or given positions.

    `None` if they do not, or if they are unknown. Cached tokens whose positions were not recorded are counted.
    """
    mask, known = state.attention_mask, state.held or recorded(state.cache_object)
    if traced() or state.cache_changed or (mask is None and state.position_ids is None):
        return None
    assert state.offset is not None
    slots = torch.arange(int(state.offset), device=state.device)
    if known is not None and not known.by_next_mask and int(known.length) >= len(slots):
        cached = known.at(slots)
    else:
        cached = slots.unsqueeze(0) if mask is None else counted_tokens(mask)
    before, after = cached[:, : len(slots)].amax(-1) + 1, state.positions().lengths.squeeze(-1)
    rows = max(len(before), len(after))
    if len(before) not in (1, rows) or len(after) not in (1, rows):
        return None  # Somebody has changed the rows of a cache, which other parts refuse.
    return list(zip(before.expand(rows).tolist(), after.expand(rows).tolist(), strict=True))


def vectors(
    additive: AdditiveEncoding, state: ForwardState, positions: Callable[[], Positions] | None = None
) -> Tensor:
    """`(batch or 1, length, hidden)`: the vectors of the tokens of a call.

    Args:
        additive: the part of the scheme.
        state: the state of the call.
        positions: returns those of the tokens, none of which may be before the first one. By default they are those of
            the state, as they are.
    """
    check_cache(additive, state)
    given = (state.positions if positions is None else positions)()
    if positions is not None:
        refuse_negative(state, given.ids, additive.offset)
    with without_autocast(given.ids.device):
        return state.replica(additive)(given)


def negative_positions(state: ForwardState, ids: Tensor, first: int = 0) -> Tensor | None:
    """0-dim bool: whether the caller gave a real token a position before the first one, which is that of padding.

    `None` if no positions were given, or the mask does not show which tokens are real. Padding of a grid has no mask.
    """
    if state.position_ids is None or state.mask_hides_padding or state.of_grid:
        return None
    counted = state.mask_positions()
    before = ids < first
    return (before if counted is None else before & (counted.to(ids.device) >= 0)).any()


def refuse_negative(state: ForwardState, ids: Tensor, offset: int) -> None:
    """Refuses positions of real tokens for which a table with `offset` rows before position 0 has no row."""
    if torch.jit.is_tracing() or ids.is_meta:
        return
    negative = negative_positions(state, ids, -offset)
    if negative is not None:
        require(~negative, NEGATIVE)


def in_dtype(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors of positions in the dtype of a model."""
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
