"""Replacements for modules that use positions: tables, the first layer's input in models without, rotary modules.

A position table is an nn.Embedding-like module in which an architecture looks up positions. Their `forward` signatures
differ (position ids, a mask and a length, the input ids, an input shape), and so does the row of the first token. To
support all of them, the table's own forward is run with a numbered table, whose row p holds the number p. Its output
shows which rows the architecture would have looked up.

Buffers that are as long as the native table, and are sliced to the length of the input, are made longer. They are the
`position_ids` and `token_type_ids` of BERT-style embeddings, the rotary tables of GPT-J and CodeGen, which no scheme
reads, and the causal masks of GPT and GPT-Neo. Without longer buffers, even a scheme without a table would be limited
to the length of the native one.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import modules_by_stack
from hf_posenc.patching.anatomy.sites import WEIGHT_NAMES, PositionTable, table_weight
from hf_posenc.patching.anatomy.weights import copied
from hf_posenc.patching.call.cache_checks import in_dtype, vectors
from hf_posenc.patching.call.forward_state import ForwardState, one_axis
from hf_posenc.patching.call.grid_state import GridState, in_order, numbers_in
from hf_posenc.patching.call.outside_stack import is_outside, state_of_layer
from hf_posenc.patching.forwards import (
    OfStack,
    PlacedForward,
    Viewed,
    WithOverrides,
    forward_parameters,
    is_of_transformers,
    named_arguments,
)
from hf_posenc.schemes.parts import AdditiveEncoding
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.weights import traced

if TYPE_CHECKING:
    from hf_posenc.patching.call.runtime import StackRuntime

#: Rows of a numbered table. It takes half a megabyte and is longer than any table in use.
_NUMBERED_ROWS = 131_072
#: A length that no input reaches.
_FARTHEST = 2**31


class TableSite(PlacedForward):
    """Stands in for the `forward` of one position table.

    Args:
        table: the table; its weight is kept, but not used.
        runtime: the runtime of its stack.
        additive: the scheme's part, or `None` for no position encoding.
    """

    def __init__(self, table: PositionTable, runtime: StackRuntime, additive: AdditiveEncoding | None) -> None:
        super().__init__(table.module, runtime)
        self.table = table
        self.additive = additive
        self._numbered: nn.Module | None = None
        if not self._is_plain:
            self._numbered_table()  # A compiled first call cannot copy a module.

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_numbered": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns `(batch or 1, query_len, hidden)` in the native dtype, with the table's extra outputs, if any."""
        weight = self.table.weight
        if self.additive is None and self._is_plain:
            return torch.zeros(1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        rows, extras = self.looked_up_rows(args, kwargs)
        if self.additive is None:
            encoded = torch.zeros(1, 1, weight.shape[1], device=weight.device)
        else:
            state = self.runtime.state_for(rows.shape[-1], weight.device)
            more = _appended(self.runtime, state, rows.shape[-1])
            if rows.shape[-1] == more:
                encoded = torch.zeros(1, more, weight.shape[1], device=weight.device)
            else:
                of_tokens = rows[..., :-more] if more else rows
                encoded = _padded(vectors(self.additive, state, lambda: self._positions(state, of_tokens)), more)
        encoded = in_dtype(encoded, weight.dtype)
        return encoded if extras is None else (encoded, *extras)

    @property
    def _is_plain(self) -> bool:
        return type(self.module).forward is nn.Embedding.forward

    def looked_up_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...] | None]:
        """`(batch or 1, query_len)` int64: the rows that the architecture would look up.

        Also returns any outputs of the table besides its vectors (a scaling factor in I-BERT), or `None`.
        """
        if self._is_plain:
            return one_axis(args[0] if args else kwargs["input"]), None
        output, extras = self._numbered_table()(*args, **kwargs), None
        if isinstance(output, tuple):
            output, extras = output[0], output[1:]
        return one_axis(output.squeeze(-1).round().to(torch.int64)), extras

    def _numbered_table(self) -> nn.Module:
        weight, state, numbered = self.table.weight, self.runtime.states.top, self._numbered
        cached = state.offset if state is not None and isinstance(state.offset, int) else 0
        needed = cached + (0 if state is None else state.query_length) + self.table.origin
        known = None if numbered is None else table_weight(numbered)
        if numbered is None or known is None or known.shape[0] <= needed or known.device != weight.device:
            rows = max(_NUMBERED_ROWS, weight.shape[0], 2 * needed)
            numbered = _with_weight(self.module, torch.arange(rows, dtype=torch.float32, device=weight.device))
            self._numbered = numbered
        return numbered

    def _positions(self, state: ForwardState, rows: Tensor) -> Positions:
        if state.goes_on or (state.position_ids is not None and not self.runtime.reads_position_ids):
            # The architecture counts slots.
            return state.positions()
        ids = rows - self.table.origin
        watch, mask = self.runtime.watch, state.attention_mask
        other = watch is not None and not is_of_transformers(type(watch.stack).__module__)
        if other and state.position_ids is None and isinstance(state.offset, int) and not state.offset and not traced():
            late = ids[..., :1] > 0
            if (late if mask is None else late & (mask[:, :1] != 0).to(late.device)).any():
                raise UnsupportedError(
                    f"The first token has row {int(rows.min())} of {self.table.path}, not row {self.table.origin}, so "
                    "padded rows would get the wrong positions. Declare hf_posenc.Architecture(rows_before=...) for "
                    "this model type, with hf_posenc.register_architecture."
                )
        counted = state.mask_positions()
        if state.position_ids is None and counted is not None and state.attention_mask is not None:
            # Architectures that use slots as positions encode a left-padded sequence differently from the same sequence
            # without padding. Rows whose first slot is padding are counted over real tokens instead.
            left_padded = state.attention_mask[:, :1] == 0
            ids = torch.where(left_padded.to(ids.device), counted.to(ids.device), ids)
        return state.counted_by_model(ids)


def _appended(runtime: StackRuntime, state: ForwardState, length: int) -> int:
    """How many of the `length` tokens of a module are padding that the architecture has appended.

    If the call has more tokens than `length`, all of them are (Longformer with `inputs_embeds`).
    """
    more = length - state.query_length if runtime.appends_padding else 0
    return length if more < 0 else more


def _padded(encoded: Tensor, more: int) -> Tensor:
    return nn.functional.pad(encoded, (0, 0, 0, more)) if more else encoded


class TableOwner(Viewed, PlacedForward):
    """Stands in for the `forward` of a module that compares the length of its input with the rows of its table.

    The module runs its own forward with another `self`, in which the table has as many rows as any input. CLIP's text
    embeddings and those of its descendants would refuse lengths that only the discarded table limits.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward."""
        return type(self.module).forward(self.view, *args, **kwargs)

    def replaced(self) -> dict[str, Any]:
        """The table, with a weight that shows no number of rows that an input could exceed. Its values are not used."""

        def long(view: Any) -> Any:
            table: Any = getattr(self.module, self.name)
            weight: Any = table_weight(table)
            # A single number takes no memory.
            return WithOverrides(table, weight=weight.new_full((1, 1), torch.nan).expand(_FARTHEST, weight.shape[1]))

        return {self.name: property(long)}


def _with_weight(module: nn.Module, numbers: Tensor) -> nn.Module:
    """A copy of the table module whose row p is `[p]`; writing to it does not change the original."""
    clone = copied(module, Tensor.detach)
    clone.__dict__.pop("forward", None)
    places: tuple[Any, ...] = (clone._parameters, clone._buffers, clone.__dict__)
    for place, name in itertools.product(places, WEIGHT_NAMES):
        if place.get(name) is not None:
            place[name] = numbers.unsqueeze(-1)
    return clone


class AddToHiddenStates(OfStack):
    """Forward pre-hook (with kwargs) of a stack's first layer.

    At this point the embeddings have been scaled, normalised and dropped out, and it no longer matters whether the
    model was given `input_ids` or `inputs_embeds`.
    """

    def __init__(self, runtime: StackRuntime, additive: AdditiveEncoding) -> None:
        self.runtime = runtime
        self.additive = additive

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the layer's arguments with the encoding added to `hidden_states`."""
        if args and isinstance(args[0], Tensor):
            return (self._add(args[0], layer, args, kwargs), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: self._add(kwargs[name], layer, args, kwargs)}

    def _add_on_grid(self, hidden_states: Tensor, phases: Any) -> Tensor:
        """Adds the vectors of patches: `(batch, tokens, hidden)`, without a batch, or with rows and columns."""
        grid = tuple(hidden_states.shape[1:3]) if hidden_states.dim() == 4 else None
        tokens = hidden_states.shape[-2] if grid is None else grid[0] * grid[1]
        state = self.runtime.state_for(tokens, hidden_states.device, grid)
        if state.numbered and phases is not None:
            state = in_order(state, numbers_in(phases))
        encoded = vectors(self.additive, state).to(hidden_states.dtype)
        return hidden_states + (encoded if hidden_states.dim() == 3 else encoded.view(-1, *hidden_states.shape[1:]))

    def _add(self, hidden_states: Tensor, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.runtime.layout.has_axes:
            return self._add_on_grid(hidden_states, kwargs.get("position_embeddings"))
        length = hidden_states.shape[0 if self.runtime.time_major else -2]
        if is_outside(self.runtime):
            state = state_of_layer(self.runtime, layer, args, kwargs, length).on(hidden_states.device)
        else:
            state = self.runtime.state_for(length, hidden_states.device)
        if self.runtime.time_major and state.offset:
            raise UnsupportedError(
                "The memory of this architecture stores the input of its first layer before positions are added, so "
                "the remembered tokens would have no positions under an additive scheme. Call it with use_mems=False."
            )
        more = _appended(self.runtime, state, length)
        if state.query_length + more != length:
            state = state.by_slots(length)
        encoded = _padded(in_dtype(vectors(self.additive, state, state.positions), hidden_states.dtype), more)
        return hidden_states + (encoded.transpose(0, 1) if self.runtime.time_major else encoded)


#: Maximum number of placeholders that are stored for one rotary module.
_MAX_PLACEHOLDERS = 64


class RotaryModuleSite(PlacedForward):
    """Stands in for the `forward` of a rotary module and records the positions that the model passes to it.

    Args:
        module: the rotary module.
        runtime: the runtime of its stack.
        unused: whether the rotation of every layer is replaced or skipped, so that the phases are unused. They are
            then computed only once for each shape of the arguments. Later calls return placeholders of the same
            shapes, a single NaN expanded without using memory, so that any accidental use shows up as NaN. In a stack
            of patches, they are numbers of the tokens: some models bring their patches into another order after the
            phases are computed, for attention in windows, and the numbers that a layer receives show this order.
    """

    def __init__(self, module: nn.Module, runtime: StackRuntime, *, unused: bool) -> None:
        super().__init__(module, runtime)
        self.unused = unused
        #: Whether the phases of no rotation are returned: another module rotates queries with them (PEFT's prompts).
        self.neutral = False
        self._placeholders: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_placeholders": {}}

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the phases of the module's own forward, or placeholders of the same shapes if they are unused."""
        position_ids = args[0] if args else kwargs.get("position_ids")
        state = self.runtime.states.top
        if self.unused and self.runtime.layout.has_axes:
            phases = self.stock(x, *args, **kwargs)
            return state.numbered_phases(phases, position_ids) if isinstance(state, GridState) else phases
        if state is not None and isinstance(position_ids, Tensor):
            state.rotary_position_ids = position_ids
            if position_ids.dim() == 3 and getattr(self.module, "mrope_section", None) is None:
                # It supports one axis. Before transformers 5.19 it has a matrix product that refuses three dimensions.
                first = position_ids[0]
                args, kwargs = ((first, *args[1:]), kwargs) if args else (args, kwargs | {"position_ids": first})
        if self.neutral:
            cos, sin = type(self.module).forward(self.module, x, *args, **kwargs)
            return torch.ones_like(cos), torch.zeros_like(sin)
        if not self.unused or torch.compiler.is_compiling() or torch.jit.is_tracing():
            # A compiler removes unused phases by itself.
            return type(self.module).forward(self.module, x, *args, **kwargs)
        named = ((name, _signature(value)) for name, value in kwargs.items())
        signature = (_signature(x), *map(_signature, args), *named)
        placeholder = self._placeholders.get(signature)
        if placeholder is not None:
            return placeholder
        phases = type(self.module).forward(self.module, x, *args, **kwargs)
        if len(self._placeholders) >= _MAX_PLACEHOLDERS:
            self._placeholders.clear()
        self._placeholders[signature] = _placeholder(phases)
        return phases


def _signature(value: Any) -> Hashable:
    """The properties of an argument that determine the shape, dtype and device of the phases."""
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def _placeholder(phases: Any) -> Any:
    """A NaN expanded to the shape of the phases; `None` if they are neither a tensor nor a tuple of tensors."""
    if isinstance(phases, tuple):
        placeholders = tuple(map(_placeholder, phases))
        return None if None in placeholders else placeholders
    if not isinstance(phases, Tensor):
        return None
    with torch.inference_mode(False):
        return torch.full((), torch.nan, dtype=phases.dtype, device=phases.device).expand(phases.shape)


#: Sines and cosines `(length, width)`.
_PHASES = "embed_positions"
#: Zeros.
_TYPES = "token_type_ids"
#: A causal mask `(1, 1, length, length)`.
_MASK = "bias"
#: The buffers, and their numbers of axes. Those of ids are `(1, length)`.
_BUFFERS = {"position_ids": 2, _TYPES: 2, _PHASES: 2, _MASK: 4}
#: The length of a mask grows to a multiple of this, because its size is the square.
_MASK_STEP = 256
#: Length of the buffers in an exported program, which cannot extend them.
EXPORTED_LENGTH = 2**15


class SlotBuffers:
    """The buffers of one stack, none of them part of its state dict.

    Args:
        rows_before: number of rows before that of the first token in the position table; RoBERTa indexes its buffers by
            row.
    """

    def __init__(self, rows_before: int) -> None:
        self.native_lengths: list[tuple[nn.Module, str, int]] = []
        #: Measured before the first call, because a graph is made for the value that it finds.
        self.shortest = 0
        #: The names of buffers that positions index.
        self.indexed: set[str] = set()
        self.rows_before = rows_before

    def reach(self, stack: nn.Module, length: int, *, masks: bool = True) -> None:
        """Extends every buffer to at least `length` tokens; existing slots keep their values."""
        length += self.rows_before
        if not 0 < self.shortest < length:
            return
        for module, name, buffer in _slot_buffers(stack):
            native = _length(name, buffer)
            if native >= length or (name == _MASK and not masks):
                continue
            self.native_lengths.append((module, name, native))
            if name == _MASK:
                module._buffers[name] = _longer_mask(module, buffer, length)
            elif name == _PHASES:
                more = buffer.new_zeros(max(length, 2 * native) - native, buffer.shape[1])
                module._buffers[name] = torch.cat([buffer, more])
            else:
                rows = buffer.new_zeros(1, max(length, 2 * native))
                if name == "position_ids":  # 0, 1, 2, ... after the first one.
                    rows = buffer[:, :1] + rows.new_ones(rows.shape).cumsum(-1) - 1
                module._buffers[name] = rows
        self.measure(stack)

    def measure(self, stack: nn.Module) -> None:
        """Finds the length of the shortest buffer, 0 without any."""
        buffers = _slot_buffers(stack)
        self.shortest = min((_length(name, buffer) for _, name, buffer in buffers), default=0)
        self.indexed = {name for _, name, _ in buffers} & {_TYPES, _PHASES}

    def reach_positions(
        self,
        stack: nn.Module,
        position_ids: Tensor,
        tokens: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Same as `reach` for positions passed by the caller, by which BERT indexes its token types, but not masks.

        Positions on a device are not read where the call may be given its token types instead.

        Returns:
            The keyword arguments of the call.
        """
        if self.shortest == 0 or position_ids.is_meta or torch.compiler.is_compiling():
            return kwargs
        names = [*forward_parameters(type(stack))][1:]
        if not position_ids.is_cpu and self.indexed == {_TYPES} and tokens is not None and _TYPES in names:
            if named_arguments(stack, args, kwargs).get(_TYPES) is not None:
                return kwargs
            if names.index(_TYPES) >= len(args):
                return kwargs | {_TYPES: tokens.new_zeros(tokens.shape[:2], dtype=torch.long)}
        self.reach(stack, int(position_ids.max()) + 1, masks=False)
        return kwargs

    def restore(self) -> None:
        """Restores the native length of every buffer, on its current device."""
        for module, name, length in reversed(self.native_lengths):
            buffer = module._buffers[name]
            assert buffer is not None
            within = buffer[:length] if name == _PHASES else buffer[..., :length]
            module._buffers[name] = (within[..., :length, :] if name == _MASK else within).clone()
        self.native_lengths.clear()


def _slot_buffers(stack: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    buffers = []
    # The position ids of a vision tower inside a stack of text are as many as its patches.
    for module in (stack, *(module for _, module in modules_by_stack(stack)[0].members)):
        for name, axes in _BUFFERS.items():
            buffer = module._buffers.get(name) if name in module._non_persistent_buffers_set else None
            if buffer is not None and buffer.dim() == axes and (buffer.shape[0] == 1 or name == _PHASES):
                buffers.append((module, name, buffer))
    return buffers


def _length(name: str, buffer: Tensor) -> int:
    """Number of tokens that a buffer is made for."""
    return buffer.shape[0] if name == _PHASES else buffer.shape[-1]


def _longer_mask(module: nn.Module, mask: Tensor, length: int) -> Tensor:
    """A causal mask for at least `length` tokens, with the window of a local layer of GPT-Neo."""
    length = -(-length // _MASK_STEP) * _MASK_STEP
    longer = mask.new_ones(1, 1, length, length).tril()
    config: Any = getattr(module, "config", None)
    if getattr(module, "attention_type", None) == "local":
        longer = longer ^ longer.tril(-config.window_size)
    return longer
