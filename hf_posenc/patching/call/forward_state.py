"""The positions of the tokens in one forward call of a stack, and which of them are padding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from hf_posenc.attention.block_attention import without_autocast
from hf_posenc.attention.forms import MOST_MATRICES
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.weights import copied_to
from hf_posenc.patching.call.cache import GENERATION, CachedPositions, counted_tokens
from hf_posenc.schemes.parts import Part
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.weights import (
    Layers,
    exporting,
    gradients_may_be_shared,
    likeness,
    may_be_joined,
    modules_of,
    number_in_graph,
    once_in_graph,
    requires_grad,
    traced,
)

if TYPE_CHECKING:
    from hf_posenc.attention.backends import MatrixKernel
    from hf_posenc.patching.call.logit_site import LogitSite
    from hf_posenc.patching.call.split_sequence import SplitSequence

Value = TypeVar("Value")


def padding_mask(mask: Any, module: nn.Module, offset: int | Tensor | None, given: bool = False) -> Tensor | None:
    """`(batch, key_len)`, 1 at real tokens, from any kind of mask; `None` if the mask does not show padding.

    `generate` may pass prepared masks, `(batch, 1, query_len, key_len)`, one for each kind of layer. In a layer without
    a window the last query sees exactly the real tokens, unless the caller passed a custom mask, for example with one
    block per packed document. On a device this is not read in a call that starts a text, unless positions are `given`.
    """
    windowed = not isinstance(mask, dict) and getattr(getattr(module, "config", None), "sliding_window", None)
    mask = mask.get("full_attention") if isinstance(mask, dict) else mask
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    if windowed or mask.shape[1] != 1:
        return None  # A separate mask for each head does not show which tokens are padding.
    # A finite penalty does not hide a key.
    visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2
    # A single query sees what the last one sees.
    # `generate` makes its masks from padding, if it was given no others.
    if visible.shape[1] == 1 or torch.compiler.is_compiling() or GENERATION.get() is not None:
        return visible[:, -1].to(torch.int64)
    only = _shows_padding_only(visible, offset)
    if not given and isinstance(offset, int) and offset == 0 and not only.is_cpu:
        # Where the mask shows more, tokens are counted as without a mask.
        return (visible[:, -1] | ~only).to(torch.int64)
    return visible[:, -1].to(torch.int64) if bool(only) else None


def _shows_padding_only(visible: Tensor, offset: int | Tensor | None) -> Tensor:
    """0-dim bool: whether every query sees the keys up to itself that the last query sees, and any of the later ones.

    The queries of an image see all its keys in Gemma 3 and PaliGemma.
    """
    last = visible[:, -1:]
    slots = torch.arange(visible.shape[2], device=visible.device)
    query_slots = torch.arange(visible.shape[1], device=visible.device) + (0 if offset is None else offset)
    earlier = last & (slots <= query_slots.unsqueeze(-1))
    # A padding token sees no keys, or all keys if a kernel does not support rows without keys.
    own_is_real = (
        last[:, 0].gather(1, query_slots.clamp(max=visible.shape[2] - 1).expand(visible.shape[0], -1)).unsqueeze(-1)
    )
    idle = ~own_is_real & (visible == visible[..., :1]).all(-1, keepdim=True)
    return (((earlier <= visible) & (visible <= last)) | idle).all()


def visible_pairs(mask: Any, query_length: int, key_length: int) -> Tensor | None:
    """`(batch or 1, heads or 1, query_len or 1, key_len or 1)` bool; `None` if the mask does not show it."""
    if isinstance(mask, Tensor):
        if mask.dim() != 4:
            return None
        mask = mask[..., :key_length]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if type(mask).__name__ == "BlockMask":
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(
            mask.mask_mod, mask.shape[0], mask.shape[1], query_length, key_length, mask.kv_indices.device
        )
    return None


PartType = TypeVar("PartType", bound=Part)
#: Up to this many new tokens, layers are computed together. With more, they would need much memory at a time.
FEW_TOKENS = 256
_CPU = torch.device("cpu")
#: The number of tokens of a call in which only the modules of the stack know it.
UNKNOWN = -1


@dataclass
class ForwardState:
    """Positions of one forward call, and a cache of values that its layers share.

    Args:
        query_length: number of new tokens.
        offset: number of cached slots before them; a 0-dim tensor for static caches, `None` if unknown.
        position_ids: `(batch or 1, query_len)` as passed by the caller, or `None`.
        attention_mask: `(batch, key_len)` padding mask (1 = real token) as passed by the caller, or `None`.
        coordinates: `(axes, batch, query_len)` positions on several axes, or `None`.
        token_ids: `(batch, query_len)` vocabulary ids of the new tokens, or `None`.
        mask_hides_padding: whether the caller's mask has a form that does not show which tokens are padding.
        cache_object: the cache of the call, or `None`.
        cache_changed: whether its keys have been changed since their positions were recorded.
        encoder_mask: `(batch, key_len)` padding mask of the encoder, if cross-attention has a scheme.
        held: the positions that the cache itself states for its keys, if it does and is not empty. Its keys then count
            as the only cached slots.
        held_by_layer: the same by layer, if it does; layers may hold different tokens.
        dropped: how many tokens it has dropped.
        goes_on: whether the caller passed no positions to a call with such a cache, so that `position_ids` go on from
            those of its keys.
        sequence: the tokens of all processes, if the scheme has a bias and each process has some (context parallelism).
        expected: the number of tokens that convolutions make of the input, in an encoder with a fixed input; 0 if
            unknown.
        of_grid: whether this is the state of one module of a stack of patches.
        placed: the positions of these patches; `None` if their places are unknown.
        numbered: whether the phases that a layer receives are the numbers of its tokens.
    """

    query_length: int
    offset: int | Tensor | None = 0
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    coordinates: Tensor | None = None
    token_ids: Tensor | None = None
    mask_hides_padding: bool = False
    cache_object: Any = None
    cache_changed: bool = False
    encoder_mask: Tensor | None = None
    held: CachedPositions | None = None
    held_by_layer: dict[int, CachedPositions] = field(default_factory=dict)
    dropped: int = 0
    goes_on: bool = False
    sequence: SplitSequence | None = None
    expected: int = 0
    of_grid: bool = False
    placed: Positions | None = None
    numbered: bool = False
    #: Whether the tokens may have places on a grid.
    has_places: ClassVar[bool] = False
    #: Where the tensors of this state are; `None` before the first module of the stack has asked.
    device: torch.device | None = None
    #: `position_ids` that the model itself passed to its rotary module.
    rotary_position_ids: Tensor | None = None
    #: Whether it was made in a compiled graph, which then has the whole call.
    in_graph: bool = field(default_factory=torch.compiler.is_compiling)
    #: Values that the layers of this call share.
    scratch: dict[Hashable, Any] = field(default_factory=dict)
    #: Values of the host, also for layers that are recomputed.
    of_host: dict[Hashable, Any] = field(default_factory=dict)
    #: Passed to every `Positions` of this call.
    memo: dict[Hashable, Any] = field(default_factory=dict)

    def on(self, device: torch.device) -> ForwardState:
        """This state for a module on `device`: the layers of a model may be spread over several devices.

        All states of a call share `scratch` and `memo`. What is computed on a device is computed there once.
        """
        if self.is_for(self.query_length, device):
            return self
        there = dataclasses.replace(self, device=device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Positions):
                setattr(there, name, there.shared(("moved", name), functools.partial(value.to, device), mask=value))
        return there

    def of_layer(self, module: nn.Module) -> ForwardState:
        """This state for an attention layer, if the cache holds different tokens in each layer.

        Raises:
            UnsupportedError: for a layer that does not say which of them it reads.
        """
        if all(held is self.held for held in self.held_by_layer.values()):
            return self
        held = self.held_by_layer.get(getattr(module, "layer_idx", -1))
        if held is None:
            raise UnsupportedError(
                f"The layers of this {type(self.cache_object).__name__} hold different tokens, and it is not known "
                f"which of them {type(module).__name__} reads. Let all layers drop the same tokens."
            )
        return dataclasses.replace(self, held=held, scratch={}, of_host={}, memo={})

    def is_for(self, length: int, device: torch.device) -> bool:
        """Whether this state is that of a module with `length` tokens on `device`, as that of most modules is."""
        if self.device is None:
            self.device = device
            if self.has_places or self.coordinates is not None:
                # Places of tokens are where the caller's arguments are.
                for name, value in list(vars(self).items()):
                    if isinstance(value, Tensor | Positions):
                        setattr(self, name, value.to(device))
        return self.query_length == length and self.device == device

    def replica(self, part: PartType) -> PartType:
        """A part whose weights are on the device of this state: the part itself, or a copy made for this call."""
        device = self.device
        # Most parts have no submodules, and this runs in every layer.
        weights: list[Tensor | None] = []
        for module in modules_of(part) if part._modules else (part,):
            weights += (*module._parameters.values(), *module._buffers.values())
        for weight in weights:
            if weight is not None and weight.device != device:
                break
        else:
            return part
        key = ("own", id(part), device, torch.is_grad_enabled())
        replica: PartType | None = self.scratch.get(key)
        if replica is None:
            replica = self.scratch[key] = part if device is None else copied_to(part, device)
        return replica

    @property
    def end(self) -> int | None:
        """Number of slots after this call, if the host knows it."""
        return self.offset + self.query_length if isinstance(self.offset, int) and self.query_length >= 0 else None

    def mask_positions(self) -> Tensor | None:
        """`(batch, query_len)` counted over real tokens only, -1 at padding; `None` without a usable mask."""
        mask, offset = self.attention_mask, self.offset
        if mask is None or offset is None:
            return None
        if isinstance(offset, Tensor):
            slots = torch.arange(self.query_length, device=mask.device) + offset.to(mask.device)
            return counted_tokens(mask).index_select(1, slots.clamp(max=mask.shape[1] - 1))
        if mask.shape[1] < offset + self.query_length:
            return None
        return counted_tokens(mask)[:, offset : offset + self.query_length]

    def require_whole(self, why: str) -> None:
        """Refuses what cannot be done if other processes have some of the tokens and the scheme has a bias."""
        if self.sequence is not None:
            raise UnsupportedError(f"Context parallelism cannot compute the bias of this scheme: {why}.")

    def positions(self) -> Positions:
        """The positions of the new tokens.

        They are taken from the first available source: the caller's `position_ids`, the count of real tokens in the
        mask, the positions that the model passed to its rotary module (which are correct even if the cache does not
        provide its length), and the slots.
        """
        return self.shared("positions", self._resolve)

    def _resolve(self) -> Positions:
        device = self.device
        if self.placed is not None:
            return self.placed
        if self.position_ids is not None:
            return self.with_lengths(self.position_ids.to(device))
        mask = self.attention_mask
        counted = None if mask is None else self.mask_positions()
        if counted is not None and mask is not None:
            # Real tokens of a mask are counted from 0, so no position reaches its width.
            return self.with_lengths(counted.to(device)).bounded(mask.shape[1])
        if self.rotary_position_ids is not None and (self.rotary_position_ids.dim() < 3 or self.offset is None):
            return self.counted_by_model(one_axis(self.rotary_position_ids).to(device))
        start = 0 if self.offset is None else self.offset
        if self.attention_mask is None and isinstance(start, int):
            stop = start + self.query_length
            ids = torch.arange(start, stop, device=device).unsqueeze(0)
            lengths = ids.new_full((1, 1), stop)
            return Positions(ids, lengths, self.coordinates, self.token_ids, memo=self.memo).bounded(stop)
        return self.with_lengths((torch.arange(self.query_length, device=device) + start).unsqueeze(0))

    def counted_by_model(self, ids: Tensor) -> Positions:
        """Positions that the model itself has computed from its slots, bounded without reading a device."""
        positions = self.with_lengths(ids)
        if ids.is_cpu or self.position_ids is not None or self.end is None:
            return positions
        return positions.bounded(self.end)

    def with_lengths(self, ids: Tensor) -> Positions:
        """Adds the length of each sequence: the largest position plus 1, or the number of real tokens in the mask."""
        mask = self.attention_mask
        if self.position_ids is not None or mask is None:
            counted = None if mask is None else self.mask_positions()
            # The positions of padding tokens are arbitrary.
            visible = ids if counted is None else ids.where(counted.to(ids.device) >= 0, -1)
            lengths = visible.amax(-1, keepdim=True) + 1
        else:
            lengths = mask.bool().to(torch.int64).sum(-1, keepdim=True).to(ids.device)
        return Positions(ids, lengths, self.coordinates, self.token_ids, memo=self.memo)

    def by_slots(self, length: int, window: tuple[int, ...] | None = None) -> ForwardState:
        """The state of a module with `length` tokens.

        If convolutions or patches inside the stack make the tokens, they are counted from 0, or from the end of the
        cache. The mask of the call has a column per frame or sample. It shows which tokens are padding only if there
        are as many tokens as columns.

        Otherwise an architecture prepends its own tokens (CPM-Ant's prompt), and every slot is a position.

        Raises:
            UnsupportedError: for fewer tokens than there are.
        """
        if self.query_length == UNKNOWN:
            end = self.offset + length if isinstance(self.offset, int) else length
            given, mask = self.position_ids, self.attention_mask
            return dataclasses.replace(
                self,
                query_length=length,
                position_ids=None if given is None or given.shape[-1] != length else given,
                attention_mask=None if mask is None or mask.shape[-1] != end else mask,
                rotary_position_ids=None,
                scratch={},
                of_host={},
            )
        self.require_whole("a layer has other tokens than the model, which it has added itself")
        if length < self.query_length:
            raise UnsupportedError(
                f"A layer was given {length} of the {self.query_length} tokens of this call. It is not known which, so "
                "their positions are unknown. Pass all tokens to every layer, or use a scheme that adds positions "
                "before the first layer, such as 'learned'."
            )
        return ForwardState(length, offset=self.offset, device=self.device, memo=self.memo)

    def shared(
        self,
        key: Hashable,
        compute: Callable[[], Value],
        *lengths: int,
        mask: Any = None,
        everywhere: bool = False,
        part: Part | None = None,
    ) -> Value:
        """`compute()`, evaluated once per forward and device, without autocast.

        Under gradient checkpointing, a value that requires grad is computed again for every layer. Otherwise its graph
        would be freed in the backward pass of the first layer that is recomputed.

        Args:
            key: the name of the value.
            compute: computes the value.
            *lengths: numbers of tokens that the value depends on too.
            mask: that of the layer, if the value depends on it. A graph of one layer computes the value in every call.
            everywhere: whether the value is one of the host, the same on all devices and for recomputed layers.
            part: a part whose weights the value follows from. What follows from those of one layer is computed again in
                a graph, which would depend on the layer: layers that are compiled alone would not share theirs.
        """
        of_host, compiling = everywhere and not traced(), torch.compiler.is_compiling()
        values, device = self.of_host if of_host else self.scratch, None if everywhere else self.device
        if torch._C._is_any_autocast_enabled():
            compute = functools.partial(_without_autocast, self.device or _CPU, compute)
        of_call = mask is not None and not self.in_graph
        if compiling and (of_call or (part is not None and part.of_one_layer)):
            return compute()
        if mask is not None and compiling:
            key = (key, number_in_graph(self.scratch, mask))
        elif mask is not None:
            values["mask", id(mask)] = mask  # So that its id cannot be reused.
            counts = isinstance(mask, Tensor) and not traced() and not mask.is_inference()
            key = (key, id(mask), mask._version if counts else 0)
        key = (key, None if part is None else id(part))
        if compiling and lengths:
            return once_in_graph(self.scratch, (key, device), compute, *lengths)
        if of_host:
            key = (key, *lengths)
            values[key] = values[key] if key in values else compute()
            return cast("Value", values[key])
        key = (key, device, *lengths, torch.is_grad_enabled())
        if key in self.scratch:
            return self.scratch[key]
        learned = ("learned", key)
        if learned in self.scratch and gradients_may_be_shared():
            return self.scratch[learned]
        value = compute()
        if not torch.is_grad_enabled() or not requires_grad(value):
            self.scratch[key] = value
        elif gradients_may_be_shared():
            self.scratch[learned] = value
        return value

    def together(
        self,
        site: LogitSite,
        name: str,
        inputs: Callable[[], tuple[Any, ...]],
        *lengths: Any,
        padding: int = 0,
        kernel: MatrixKernel | None = None,
    ) -> Any:
        """What the `of_layers` of a part gives for a layer, evaluated for all layers of its kind once per forward.

        The time of a narrow model depends on the number of operators. All layers together need as many as one layer.

        Args:
            site: the layer.
            name: the attribute of its encoding that holds the part, which is one of its `joined`.
            inputs: returns the arguments of `of_layers` after the parts.
            *lengths: whatever else the result depends on.
            padding: number of zeros after the values, which are a tensor.
            kernel: if given, the values are biases, and the layer gets the rows of its bias with the mask of this
                kernel.

        Returns:
            The value of the layer; `None` if it computes its own.
        """
        if traced() or self.query_length > FEW_TOKENS or (torch.is_grad_enabled() and not gradients_may_be_shared()):
            return None
        if requires_grad(self.position_ids):
            return None  # What layers compute together has gradients of their weights only.

        def of_layers() -> tuple[Any, Layers] | None:
            layers = Layers(parts_of_kind(site, name))
            alike = [*map(likeness, modules_of(layers[0]))]
            if len(layers) < 2 or not all(may_be_joined(part, alike, self.device) for part in layers):
                return None
            values = layers[0].of_layers(layers, *inputs())
            if values is None:
                return None
            return nn.functional.pad(values, (0, padding)) if padding else values, layers

        def compute() -> dict[int, Any] | None:
            computed = self.shared(("of layers", name, site.encoding.kind), of_layers, *lengths, padding)
            if computed is None:
                return None
            values, layers = computed
            if kernel is not None:
                values = kernel.rows_of_layers(values)
            each = layers.apart(values.unbind(0) if isinstance(values, Tensor) else values)
            return dict(zip(map(id, layers), each, strict=True))

        values = self.shared(("together", name, site.encoding.kind, kernel), compute, *lengths, padding)
        # A part of another class computes alone.
        return None if values is None else values.get(id(getattr(site.encoding, name)))

    def may_be_of_layers(self) -> bool:
        """Whether layers may share one more bias: not if there are many, as if each layer had its own."""
        count: int = self.scratch.get("biases", 0)
        self.scratch["biases"] = count + 1
        return count < MOST_MATRICES


def _without_autocast(device: torch.device, compute: Callable[[], Value]) -> Value:
    """`compute()`. Autocast would round positions above 256, and what follows from them, in products of matrices."""
    with without_autocast(device):
        return compute()


def parts_of_kind(site: LogitSite, name: str) -> list[Any]:
    """The parts in the layers of the same kind as that of a site, each once. They differ only in their weights."""
    of_layer, layers = getattr(site.encoding, name), getattr(site.runtime.watch, "encoding", None)
    if layers is None or site.encoding.kind is None:
        return [of_layer]
    parts = [getattr(layer, name) for layer in layers.layers if layer.kind == site.encoding.kind]
    return list({id(part): part for part in (*parts, of_layer) if type(part) is type(of_layer)}.values())


def narrow_layers(config: Any) -> set[str]:
    """The kinds of the layers, in a config, that do not see all earlier tokens."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if not kinds and getattr(config, "sliding_window", None):
        return {"sliding_attention"}
    return {*(kinds or ())} - {"full_attention", "global"}


def one_axis(position_ids: Tensor) -> Tensor:
    """`(batch, query_len)` from `(axes, batch, query_len)`; all axes of M-RoPE are equal for text.

    Raises:
        UnsupportedError: if the axes differ, for example in an image.
    """
    if position_ids.dim() == 3:
        if not torch.compiler.is_compiling() and not bool((position_ids == position_ids[:1]).all()):
            raise UnsupportedError(
                f"position_ids have {position_ids.shape[0]} axes that differ (images or video), but this scheme "
                "supports positions on one axis only. Use 'mrope' or 'rope_nd', or unpatch the model for such inputs."
            )
        return position_ids[0]
    return position_ids if position_ids.dim() == 2 else position_ids.reshape(1, -1)


def for_every_token(position_ids: Tensor, tokens: Tensor | None) -> Tensor:
    """Position ids `(batch or 1, query_len)`. A single position is that of all tokens, as in stock models."""
    if tokens is None or exporting():
        return position_ids
    rows, length = position_ids.shape
    if rows in (1, tokens.shape[0]) and length in (1, tokens.shape[1]):
        return position_ids.expand(-1, tokens.shape[1])
    raise ValueError(
        f"position_ids has the shape {tuple(position_ids.shape)}, but this call has {tokens.shape[1]} new tokens in "
        f"each of {tokens.shape[0]} rows. Pass a position for each of them, without the cached tokens."
    )
