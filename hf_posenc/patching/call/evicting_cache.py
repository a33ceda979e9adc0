"""Caches that drop tokens: what a call needs to know of them, and `SinkCache`, the rolling cache of StreamingLLM.

Any cache may drop tokens if its layers state which positions they still hold:

- `layer.key_positions`: `(batch or 1, keys)` int64, the position of each key in the layer, negative at padding; `None`
  for an empty layer. It is read before each call. Layers may hold different tokens, but as many of each row.
- `cache.expect_positions(position_ids)`, if the cache has it, is called before each call with the positions of the new
  tokens, `(batch or 1, query_len)` int64, negative at padding.

The keys of a layer are in the order of their slots. Its `get_mask_sizes(query_len)` returns the number of all keys of
the call, and the slot of the first one as if they were the last slots up to the newest token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache import CachedPositions, self_attention_cache
from hf_posenc.patching.call.forward_state import ForwardState, narrow_layers, padding_mask
from hf_posenc.schemes.position_maps.attention_sinks import AttentionSinksConfig
from hf_posenc.schemes.position_maps.pairwise import FarRotation, HiddenPairs
from hf_posenc.schemes.positions import tokens_at


def held_positions(cache: Any, stack: nn.Module) -> dict[int, Tensor]:
    """`(batch or 1, keys)` each: the positions that the layers of a cache state. If all are equal, they are one tensor.

    Raises:
        UnsupportedError: if they do not fit the keys, or the model has layers that see only the last slots.
    """
    if narrow_layers(stack.config):
        raise UnsupportedError(
            f"A {type(cache).__name__} drops tokens, but this {type(stack).__name__} has layers whose mask counts "
            "slots (a sliding window, chunks, or states of their own). Use the model's own cache."
        )
    stated: dict[int, Tensor] = {}
    for index, layer in enumerate(self_attention_cache(cache).layers):
        keys, positions = getattr(layer, "keys", None), getattr(layer, "key_positions", None)
        if not isinstance(keys, Tensor) or keys.dim() != 4 or keys.shape[-2] == 0:
            continue
        if not _fits(positions, keys):
            if isinstance(positions, Tensor):
                given = f"a {positions.dtype} tensor of the shape {tuple(positions.shape)}"
            else:
                given = repr(positions)
            raise UnsupportedError(
                f"A layer of this {type(cache).__name__} holds {keys.shape[-2]} keys in each of {len(keys)} rows, but "
                f"its key_positions are {given}. They must be a tensor of integers, (batch or 1, keys)."
            )
        stated[index] = positions
    first = next(iter(stated.values()), None)
    others = [positions for positions in stated.values() if positions is not first]
    if first is None or all(torch.equal(positions.to(first.device), first) for positions in others):
        return dict.fromkeys(stated, first) if first is not None else {}
    if any(positions.shape[1] != first.shape[1] or bool((positions < 0).any()) for positions in stated.values()):
        raise UnsupportedError(
            f"The layers of this {type(cache).__name__} hold different numbers of keys, or different tokens of padded "
            "rows, but a call has one mask for all layers. Start with a new cache if a call has failed."
        )
    return stated


def _fits(positions: Any, keys: Tensor) -> TypeGuard[Tensor]:
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.is_floating_point():
        return False
    return positions.shape[1] == keys.shape[-2] and len(positions) in (1, len(keys))


def evicting_state(
    cache: Any, stack: nn.Module, tokens: Tensor | None, given: Tensor | None, mask: Any
) -> tuple[ForwardState, Tensor | None]:
    """The positions of a call with a cache that states those of its keys. Tells the cache those of the new tokens.

    Args:
        cache: the cache.
        stack: the stack that is called.
        tokens: `(batch, query_len, ...)`, its tokens.
        given: `(batch or 1, query_len)`, the `position_ids` of the call, or `None`: they continue from the cached ones.
        mask: the mask of the call, or `None`.

    Returns:
        The state, for which the cached keys are all slots before the new tokens; and the mask for the model, with a
        column for each slot up to the newest token, if the mask has two axes, else `None`.
    """
    if tokens is None:
        raise UnsupportedError(f"A {type(cache).__name__} drops tokens, not frames or patches. Use another cache.")
    if given is not None and given.is_floating_point():
        raise UnsupportedError(
            f"A {type(cache).__name__} drops tokens by their positions, which must be integers, and these position_ids "
            f"are {given.dtype}. Pass integers, or use another cache."
        )
    keeper, device, (batch, length) = self_attention_cache(cache), tokens.device, tokens.shape[:2]
    stated = held_positions(keeper, stack)
    held = {id(ids): CachedPositions(ids.shape[1], ids.to(device).long()) for ids in stated.values()}
    first = next(iter(held.values()), None)
    known = [positions.ids for positions in held.values() if positions.ids is not None]
    padding = padding_mask(mask, stack, first.length if first else 0)
    real = None if padding is None else padding[:, -length:].to(device) != 0
    new = given
    if new is None:
        counted = torch.ones(1, length, dtype=torch.bool, device=device) if real is None else real
        ends = [positions.amax(-1, keepdim=True).clamp(min=-1) for positions in known]
        new = counted.cumsum(-1) + (torch.stack(ends).amax(0) if ends else -1)
    new = new.to(device).long() if real is None else new.to(device).long().where(real, -1)
    if hasattr(keeper, "expect_positions"):
        keeper.expect_positions(new)
    shown = columns = None
    if real is not None:
        parts = [*((positions >= 0).expand(batch, -1) for positions in known[:1]), real.expand(batch, -1)]
        shown = torch.cat(parts, 1).long()
        if isinstance(mask, Tensor) and mask.dim() == 2:
            columns = torch.cat((shown.new_ones(batch, keeper.get_mask_sizes(length, 0)[1]), shown), 1)
    return ForwardState(
        length,
        first.length if first else 0,
        new,
        shown,
        mask_hides_padding=mask is not None and padding is None,
        cache_object=cache,
        held=first,
        held_by_layer={index: held[id(positions)] for index, positions in stated.items()},
        dropped=max(0, *(int((positions.amax(-1) + 1 - (positions >= 0).sum(-1)).amax()) for positions in known), 0),
        goes_on=given is None,
    ), columns


@dataclass
class _Next:
    """What every layer does in the call that comes next.

    Args:
        slots: number of keys in that call, the held ones and the new ones; -1 if no call was announced.
        kept: `(batch or 1, count)`, those that stay; `None` for all.
        positions: `(batch or 1, count)`, theirs.
    """

    slots: int = -1
    kept: Tensor | None = None
    positions: Tensor | None = None


class _SinkLayer(DynamicLayer):
    """The keys of one layer: those of the sinks and of the last tokens."""

    def __init__(self, next_call: _Next) -> None:
        super().__init__()
        self.next_call = next_call
        #: Number of tokens so far.
        self.seen = 0
        self.key_positions: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns all keys and values of the call, and keeps what later calls need."""
        keys, values = super().update(key_states, value_states)
        coming = self.next_call
        if keys.shape[-2] != coming.slots:
            raise UnsupportedError(
                f"A SinkCache of {keys.shape[-2] - key_states.shape[-2]} keys got {key_states.shape[-2]} more, but was "
                "not told their positions. Use it with a patched model only (the native scheme is one: "
                "patch_model(model, native_scheme(model))), and start with a new cache after a call that failed."
            )
        self.keys, self.values = keys, values
        if coming.kept is not None:
            kept = coming.kept.to(keys.device)
            self.keys, self.values = tokens_at(keys, kept), tokens_at(values, kept)
        self.seen += key_states.shape[-2]
        self.key_positions = coming.positions
        return keys, values

    def get_seq_length(self) -> int:
        """Number of tokens so far, which is where the text continues."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys of a call, and the slot of the first as if they were the last ones."""
        held = 0 if self.key_positions is None else self.key_positions.shape[1]
        return held + query_length, self.seen - held

    @property
    def is_croppable(self) -> bool:
        """Whether all tokens are still there."""
        return self.key_positions is None or self.key_positions.shape[1] == self.seen

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, as long as no token was dropped: the dropped ones would be in the window again."""
        if not tokens_to_remove or self.key_positions is None:
            return
        if not self.is_croppable:
            raise UnsupportedError(
                "A SinkCache that has dropped tokens cannot be cropped, because they would be in the window again. "
                "Generate without an assistant model or prompt lookup."
            )
        super().crop(tokens_to_remove)
        self.seen = self.keys.shape[-2]
        self.key_positions = self.key_positions[:, : self.seen]

    def reset(self) -> None:
        """Empties the layer."""
        super().reset()
        self.seen, self.key_positions = 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the rows."""
        super().reorder_cache(beam_idx)
        self._change_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        super().batch_repeat_interleave(repeats)
        self._change_rows(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Selects rows."""
        super().batch_select_indices(indices)
        self._change_rows(lambda rows: rows[indices.to(rows.device)])

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.key_positions is not None and len(self.key_positions) > 1:
            self.key_positions = change(self.key_positions)


class SinkCache(Cache):
    """The rolling cache of StreamingLLM (arXiv:2309.17453) for patched models: the first tokens and the last ones.

    It never holds more than `sinks + window - 1` tokens per row between calls, however long the text. Give it to
    `generate(cache=...)` (`past_key_values=...` before transformers 5.24) or to the model. All other tokens are
    dropped, and the model does not remember them.
    The tokens that stay keep their positions, for rotations and for biases:

    - With the scheme `attention_sinks` of the same `sinks` and `window`, results equal those of the whole text, and the
      sinks are seen from the end of the window. A cache that keeps less than the scheme sees is refused. Angles of
      rotations are computed in float32 from positions that keep growing, so rounding makes them wrong by up to 0.004
      radians after 100,000 tokens, and 0.03 after a million.
    - With another scheme, every query sees the keys that are in the cache at their own distance. The new tokens of one
      call see each other, so long prompts are read in pieces (`prefill_chunk_size`) if memory must stay bounded.

    Rows may be reordered and padded on the left. Schemes that add up something over the tokens between query and key
    are refused once tokens were dropped, and so are sliding-window models and assisted decoding.

    Args:
        sinks: number of first tokens that stay.
        window: number of last tokens, the newest query's own included.
    """

    def __init__(self, sinks: int = 4, window: int = 1020) -> None:
        for name, value, least in (("sinks", sinks, 0), ("window", window, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"SinkCache.{name} is {value!r}; expected an integer of at least {least}.")
        self.sinks = sinks
        self.window = window
        self._next = _Next()
        super().__init__(layer_class_to_replicate=functools.partial(_SinkLayer, self._next))

    def expect_positions(self, position_ids: Tensor) -> None:
        """Decides, for all layers, which tokens stay after the next call.

        Args:
            position_ids: `(batch or 1, query_len)`, the positions of the new tokens, negative at padding.
        """
        if len({layer.seen for layer in self.layers if layer.key_positions is not None}) > 1:
            raise UnsupportedError(
                "The layers of this SinkCache have seen different numbers of tokens, because a call did not end. Start "
                "with a new cache."
            )
        if len(position_ids) > 1 and bool((position_ids == position_ids[:1]).all()):
            position_ids = position_ids[:1]
        held = self.layers[0].key_positions if self.layers else None
        if held is not None:
            rows = max(len(held), len(position_ids))
            position_ids = torch.cat((held.to(position_ids.device).expand(rows, -1), position_ids.expand(rows, -1)), 1)
        slots = position_ids.shape[1]
        self._next.slots, self._next.kept, self._next.positions = slots, None, position_ids
        size = self.sinks + self.window - 1
        if slots <= size:
            return
        order = torch.arange(slots, device=position_ids.device).expand_as(position_ids)
        sinks = (position_ids >= 0) & (position_ids < self.sinks)
        rank = (order + slots).where(sinks, order.where(position_ids >= 0, -1))
        kept = rank.topk(size, dim=-1).indices.sort(-1).values
        self._next.kept, self._next.positions = kept, position_ids.gather(1, kept)


def refuse_smaller_cache(state: ForwardState, bias: nn.Module | None) -> None:
    """Refuses the scheme `attention_sinks` with a `SinkCache` that has dropped tokens which the scheme sees."""
    cache = self_attention_cache(state.cache_object)
    parts = bias.modules() if bias is not None and isinstance(cache, SinkCache) else ()
    for seen in [part.far for part in parts if isinstance(part, FarRotation | HiddenPairs) and part.far.hides]:
        assert isinstance(seen, AttentionSinksConfig)
        if cache.sinks < seen.sinks or cache.window < seen.window:
            raise UnsupportedError(
                f"The scheme sees the first {seen.sinks} and the last {seen.window} tokens, but this SinkCache keeps "
                f"the first {cache.sinks} and the last {cache.window}. Use SinkCache({seen.sinks}, {seen.window}), or "
                f"patch the model with sinks={cache.sinks}, window={cache.window}."
            )
