"""What every patched attention layer has in common: its parts, and the phases and biases of the call in progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.distances import dense_bias, first_key_slot
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.rotary_calls import RotaryCall
from hf_posenc.patching.runtime import StackRuntime
from hf_posenc.patching.state import ForwardState
from hf_posenc.schemes.parts import LogitBias, QueryKeyMap
from hf_posenc.schemes.positions import Positions

Phases = tuple[Tensor, ...]


@dataclass
class LayerEncoding:
    """The parts of a scheme at one attention layer.

    Args:
        query_key_map: applied to queries and keys, or `None`.
        logit_bias: added to the logits, or `None`.
        causal: whether the layer's queries see only keys at or before them.
        num_heads: number of query heads.
        head_dim: width of the heads the scores are computed from.
    """

    query_key_map: QueryKeyMap | None
    logit_bias: LogitBias | None
    causal: bool
    num_heads: int
    head_dim: int


@dataclass
class LayerCall:
    """What has happened so far in one call of a layer.

    Args:
        state: of the stack's call it belongs to.
        rotations: how often a rotary function of the architecture was replaced by the scheme's map.
        keys_mapped: whether keys were mapped on their way into the cache.
        attended: whether the attention function was reached.
    """

    state: ForwardState
    rotations: int = 0
    keys_mapped: bool = False
    attended: bool = False


class AttentionSite:
    """Stands in for the `forward` of one attention module instance.

    Deep copies and pickles follow the module: the site refers to it as an ordinary attribute.
    """

    def __init__(self, module: nn.Module, runtime: StackRuntime, encoding: LayerEncoding) -> None:
        self.module = module
        self.runtime = runtime
        self.encoding = encoding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward with the scheme in place."""
        raise NotImplementedError

    def current_state(self, query_length: int) -> ForwardState:
        """The state of the stack's call in progress; a plain one for a layer that is called on its own."""
        return self.runtime.state_for(query_length)

    def rotate(self, call: LayerCall, rotary: RotaryCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for a rotary function of the architecture: maps its tensors, or hands them back as they are."""
        first, second, time_axis = rotary.tensors(args, kwargs)
        return self.rotate_tensors(call, first, second, time_axis)

    def rotate_tensors(self, call: LayerCall, first: Tensor, second: Tensor | None, time_axis: int) -> Any:
        """Maps a query and a key, or one tensor of a function that is called once for each."""
        query_key_map = self.encoding.query_key_map
        if query_key_map is not None and _fits(query_key_map, first):
            phases = self.phases(call.state, first.device)
            map_first = query_key_map.map_key if second is None and call.rotations else query_key_map.map_query
            first = mapped(map_first, first, phases, time_axis)
            if second is not None:
                second = mapped(query_key_map.map_key, second, phases, time_axis)
            call.rotations += 1
        return first if second is None else (first, second)

    def phases(self, state: ForwardState, device: torch.device) -> Phases:
        """Phases of the new tokens, computed once per forward for all layers that share the map."""
        query_key_map = self.encoding.query_key_map
        assert query_key_map is not None
        positions = state.rotary_positions(device)
        key = ("phases", id(query_key_map), id(positions.ids))

        def compute() -> Phases:
            if query_key_map.length_dependent:
                check_cache(query_key_map, state)
            return query_key_map.phases(positions)

        phases: Phases = state.shared(key, compute)
        return phases

    def slot_phases(self, state: ForwardState, start: int | Tensor, length: int, device: torch.device) -> Phases:
        """Phases of `length` consecutive slots from `start`, for layers that show their keys after the cache only."""
        query_key_map = self.encoding.query_key_map
        assert query_key_map is not None

        def compute() -> Phases:
            if query_key_map.length_dependent:
                check_cache(query_key_map, state)
            ids = (torch.arange(length, device=device) + start).unsqueeze(0)
            offset = 0 if state.offset is None else state.offset
            total = torch.as_tensor(offset + state.query_length, device=device).reshape(1, 1)
            return query_key_map.phases(Positions(ids, torch.maximum(total, ids.amax(-1, keepdim=True) + 1)))

        slot = start if isinstance(start, int) else "static"
        phases: Phases = state.shared(("slots", id(query_key_map), slot, length), compute)
        return phases

    def bias(self, state: ForwardState, query_length: int, key_length: int, device: torch.device) -> Tensor:
        """`(1, heads, query_len, key_len)` float32."""
        logit_bias = self.encoding.logit_bias
        assert logit_bias is not None
        offset = state.slot_offset(query_length, key_length)
        key = ("bias", id(logit_bias), query_length, key_length)
        result: Tensor = state.shared(key, lambda: dense_bias(logit_bias, offset, query_length, key_length, device))
        if result.shape[1] != self.encoding.num_heads:
            raise UnsupportedError(
                f"The bias has {result.shape[1]} heads, the layer {self.encoding.num_heads}: it was built for another "
                "architecture."
            )
        return result

    def key_start(self, state: ForwardState, query_length: int, key_length: int) -> tuple[int | Tensor, int | Tensor]:
        """Slots of the first query and of the first key."""
        offset = state.slot_offset(query_length, key_length)
        return offset, first_key_slot(offset, query_length, key_length)


def check_cache(part: Any, state: ForwardState) -> None:
    """Lets a part whose encoding depends on the length refuse a cache that has become wrong.

    Raises:
        UnsupportedError: for such a cache, and for several documents in one row, which have no single length.
    """
    if not torch.compiler.is_compiling() and _is_packed(state):
        raise UnsupportedError(
            "position_ids start again within a row (packed documents), but this scheme encodes a token by the length "
            "of its sequence, and a packed row has several. Pass the documents as separate rows."
        )
    offset = state.offset
    if offset is None:
        return
    cached = int(offset)
    if cached > 0:
        part.check_cache(cached, cached + state.query_length)


def _is_packed(state: ForwardState) -> bool:
    """Whether positions start again between two real tokens of a row."""
    ids, mask = state.position_ids, state.attention_mask
    if ids is None:
        return False
    restarts = ids.diff(dim=-1) < 0
    if mask is not None and mask.shape[1] >= ids.shape[1]:
        real = mask[:, -ids.shape[1] :].bool().to(ids.device)
        restarts = restarts & real[:, 1:] & real[:, :-1]
    return bool(restarts.any())


def _fits(query_key_map: QueryKeyMap, tensor: Tensor) -> bool:
    """Whether the slice an architecture hands to its rotary function is as wide as the map."""
    width = getattr(query_key_map, "rotary_dim", None)
    return width is None or tensor.shape[-1] >= width


def mapped(map_one: Any, tensor: Tensor, phases: Phases, time_axis: int) -> Tensor:
    """Applies `map_query` or `map_key` to a tensor whose token axis is 1 or 2."""
    if time_axis == 2:
        result: Tensor = map_one(tensor, phases)
        return result
    return map_one(tensor.transpose(1, 2), phases).transpose(1, 2)
