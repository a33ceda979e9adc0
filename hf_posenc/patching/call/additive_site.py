"""Adding positions to the input of the first layer, for architectures without a position table."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.grid_state import GridState, numbers_in
from hf_posenc.patching.call.length_checks import check_cache, in_dtype, refuse_negative
from hf_posenc.patching.call.placed_forward import OfStack
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.schemes.parts import AdditiveEncoding


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
        phases = kwargs.get("position_embeddings")
        if args and isinstance(args[0], Tensor):
            return (self._add(args[0], phases), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: self._add(kwargs[name], phases)}

    def _add_on_grid(self, hidden_states: Tensor, phases: Any) -> Tensor:
        """Adds the vectors of patches: `(batch, tokens, hidden)`, without a batch, or with rows and columns."""
        grid = tuple(hidden_states.shape[1:3]) if hidden_states.dim() == 4 else None
        tokens = hidden_states.shape[-2] if grid is None else grid[0] * grid[1]
        state = self.runtime.state_for(tokens, hidden_states.device)
        if isinstance(state, GridState):
            state = state.of_module(tokens, grid)
            if state.numbered and phases is not None:
                state = state.in_order(numbers_in(phases))
        check_cache(self.additive, state)
        encoded = state.own(self.additive)(state.positions()).to(hidden_states.dtype)
        return hidden_states + (encoded if hidden_states.dim() == 3 else encoded.view(-1, *hidden_states.shape[1:]))

    def _add(self, hidden_states: Tensor, phases: Any) -> Tensor:
        if self.runtime.layout.has_axes:
            return self._add_on_grid(hidden_states, phases)
        time_axis = 0 if self.runtime.time_major else -2
        length = hidden_states.shape[time_axis]
        state = self.runtime.state_for(length, hidden_states.device)
        if self.runtime.time_major and state.offset:
            raise UnsupportedError(
                "The memory of this architecture stores the input of its first layer before positions are added, so "
                "the remembered tokens would have no positions under an additive scheme. Call it with use_mems=False."
            )
        if state.query_length != length:
            state = state.by_slots(length)
        check_cache(self.additive, state)
        positions = state.positions()
        refuse_negative(state, positions.ids, self.additive.offset)
        encoded = in_dtype(state.own(self.additive)(positions), hidden_states.dtype)
        return hidden_states + (encoded.transpose(0, 1) if self.runtime.time_major else encoded)
