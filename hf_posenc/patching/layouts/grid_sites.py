"""Replacements for the modules of a stack of patches: projections and tables.

The module that owns a table runs its own forward with another `self`: a view that shares all attributes of the module,
except that the table is the vectors of this call, and that a method which interpolates the table returns them too. What
follows the table (norms, dropout, masking of patches) is therefore as in the stock model.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.sites import OwnedTable
from hf_posenc.patching.call.cache_checks import vectors
from hf_posenc.patching.call.grid_state import GridState, pixels_among
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.forwards import PlacedForward, Viewed, forward_parameters, names_used
from hf_posenc.schemes.parts import AdditiveEncoding

#: An argument without which a module refuses pictures whose size differs from that of its table.
OTHER_SIZES = "interpolate_pos_encoding"
#: The attribute with the table's size, in pixels.
_SIZE = "image_size"
#: Methods that return the table for the grid of a call.
_INTERPOLATIONS = (
    "interpolate_pos_encoding", "_resize_pos_embed", "interpolation", "_interpolate_position_embedding",
)  # fmt: skip
#: A method that returns the table as `(1, rows, columns, hidden)`, without prefix rows.
_MAP = "get_absolute_positions"
#: A method that does the same, or resizes the rows of patches that it is given (`(1, patches, hidden)`, InternViT).
_GIVEN = "_get_pos_embed"
#: Functions with which a module reads its table at the places of patches, whatever their number. Such a module adds the
#: result to the patches and returns the sum.
_RESAMPLING = frozenset(("grid_sample", "embedding_bag", "get_vision_nearest_position_ids", "bucketize"))
#: A method that resizes the table to several images, and pads the result.
_RESIZING = "resize_positional_embeddings"
#: A method that drops random patches.
_MASKING = "random_masking"


class ProjectionSite(PlacedForward):
    """Stands in for the `forward` of a patch projection and records the sizes of the grid."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the projection, `(batch, hidden, [frames,] rows, columns)`."""
        output = self.stock(*args, **kwargs)
        state = self.runtime.states.top
        if isinstance(state, GridState):
            # Patches that were cut out before are projected one by one, which shows no grid.
            state.grid = tuple(output.shape[2:]) if output.shape[2:].numel() > 1 else None
        return output


def refuses_other_sizes(module: nn.Module) -> bool:
    """Whether a module compares the sizes of pictures with those of its config, to suit a position table."""
    size = module.__dict__.get(_SIZE)
    forward: Any = type(module).forward
    return isinstance(size, tuple | list) and _SIZE in names_used(forward) and OTHER_SIZES not in names_used(forward)


class GridTableSite(Viewed, PlacedForward):
    """Stands in for the `forward` of a module that owns tables over a grid, or refuses pictures of another size.

    Args:
        module: the module.
        tables: the tables of its stack. The first becomes the vectors of the scheme, and others become zeros.
        runtime: the runtime of its stack.
        additive: the scheme's part, or `None` for no position encoding.
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Sequence[OwnedTable],
        runtime: StackRuntime,
        additive: AdditiveEncoding | None,
    ) -> None:
        super().__init__(module, runtime)
        self.prefix_rows = {table.name: table.prefix_rows for table in tables if table.module is module}
        self.hidden_size = tables[0].weight.shape[-1] if tables else 0
        self.main = tables[0].name if tables and tables[0].module is module else None
        self.additive = additive
        #: Whether the stack has no other table. With several tables, one may have a row per frame.
        self.alone = len(tables) == 1
        self.compares_sizes = refuses_other_sizes(module)
        self.resizes = any(hasattr(module, name) for name in (*_INTERPOLATIONS, _MAP, _GIVEN, _RESIZING))
        #: Whether the module reads its table at other places than the patches, and adds the result last.
        self.resamples = bool(_RESAMPLING & names_used(type(module).forward))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward with the vectors of the scheme as its table."""
        names = list(forward_parameters(type(self.module)))[1:]
        named = dict(zip(names, args, strict=False)) | kwargs
        # Perceiver's text tables have the argument too, but are never called with pixels or a size.
        if OTHER_SIZES in names and any(isinstance(value, Tensor | tuple) for value in named.values()):
            args, kwargs = (), named | {OTHER_SIZES: True}
        if self.compares_sizes and isinstance(self.runtime.states.top, GridState):
            self.runtime.states.top.pixels = pixels_among((*args, *kwargs.values()))
        output = type(self.module).forward(self.view, *args, **kwargs)
        return self._with_vectors(output) if self.resamples and self.main is not None else output

    def _with_vectors(self, output: Tensor) -> Tensor:
        """Adds the vectors to embedded patches, `(tokens, hidden)` or `(batch, tokens, hidden)`."""
        if self.additive is None:
            return output
        vectors = self._encoded(output.shape[-2], output.device).to(output.dtype)
        return output + vectors.view(-1, *output.shape[1:]) if output.dim() == 3 else output + vectors[0]

    def replaced(self) -> dict[str, Any]:
        """The tables, the methods that resize them or drop patches, and a size that is compared with pictures."""
        module, main = self.module, self.main
        replaced: dict[str, Any] = {name: self._in_place_of(name) for name in self.prefix_rows}
        if self.compares_sizes:
            replaced[_SIZE] = property(
                lambda view: getattr(self.runtime.states.top, "pixels", None) or module.__dict__[_SIZE]
            )
        if main is not None:
            methods: dict[str, Callable[..., Tensor]] = {_MAP: self._map, _GIVEN: self._as_given}
            methods |= dict.fromkeys(_INTERPOLATIONS, self._as_table)
            methods[_RESIZING] = self._resized
            for name, vectors in methods.items():
                if hasattr(module, name):
                    replaced[name] = self._instead(main, name, vectors)
        if hasattr(module, _MASKING):
            replaced[_MASKING] = lambda view, *args, **kwargs: self._noting_kept(*args, **kwargs)
        return replaced

    def _instead(self, table: str, name: str, vectors: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A method of the view that returns vectors of the scheme if they replace a table."""
        module, of_class = self.module, inspect.getattr_static(type(self.module), name, None)

        def method(view: Any, *args: Any, **kwargs: Any) -> Tensor:
            if self.stands_in(table):
                return vectors(table, *args, **kwargs)
            stock: Any = getattr(module, name) if of_class is None else of_class.__get__(view, type(view))
            zeros = self.zeros_like_call(table)
            if zeros is None:
                return stock(*args, **kwargs)
            with contextlib.suppress(RuntimeError, ValueError):
                resized: Tensor = stock(*args, **kwargs)
                if resized.dim() != 3 or resized.shape[1] in (zeros.shape[1], zeros.shape[1] - self.prefix_rows[table]):
                    return resized
            # The stock method cannot resize this table. Zeros in the size of the call have the same effect.
            return zeros

        return method

    def _in_place_of(self, name: str) -> property:
        if isinstance(getattr(self.module, name), nn.Module):
            return property(lambda view: _EmbeddingView(self, name))
        return property(lambda view: self._in_shape_of(name))

    def _as_table(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The vectors in place of an interpolated table: a map if the table is one."""
        return self._map(name) if self.native(name).dim() == 4 else self.vectors(name)

    def _as_given(self, name: str, table: Any, *sizes: Any) -> Any:
        """The vectors in place of a resized table. The rows that are given are those of the view."""
        return self._map(name) if self.native(name).dim() == 4 else table

    def _resized(self, name: str, *sizes: Any, max_length: int | None = None) -> Tensor:
        """The vectors in place of a resized table: padded to `max_length`, or `(tokens, hidden)` of packed images."""
        vectors = self.vectors(name, max_length)
        return vectors.squeeze(0) if max_length is None else vectors

    def _noting_kept(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own `random_masking`, and records which patches it keeps."""
        shown, mask, restoring = getattr(self.module, _MASKING)(*args, **kwargs)
        state = self.runtime.states.top
        if isinstance(state, GridState):
            state.kept = restoring.argsort(dim=1)[:, : shown.shape[1]]
        return shown, mask, restoring

    def _in_shape_of(self, name: str) -> Tensor:
        """The vectors in the number of dimensions of the table: some tables are `(1, rows, columns, hidden)`."""
        table = self.native(name)
        if not self.stands_in(name):
            return torch.zeros_like(table)
        vectors = self.vectors(name)
        if table.dim() == 4:
            return self._map(name)
        return vectors if table.dim() == 3 else vectors.squeeze(0)

    def _map(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """`(1, rows, columns, hidden)`: the vectors of the patches."""
        state = self.runtime.states.top
        assert isinstance(state, GridState)
        assert state.grid is not None
        return self.vectors(name)[:, self.prefix_rows[name] :].reshape(1, *state.grid[-2:], -1)

    def vectors(self, name: str, length: int | None = None) -> Tensor:
        """`(batch or 1, prefix rows + patches, hidden)`: the vectors that replace a table that they stand in for.

        Raises:
            UnsupportedError: if the grid of the call is unknown.
        """
        state, zeros = self.runtime.states.top, self.zeros_like_call(name)
        if zeros is not None:
            return zeros
        if not isinstance(state, GridState) or not state.is_known:
            raise UnsupportedError(
                f"{type(self.module).__name__} read its position table {name!r} before its patches were projected, or "
                "outside its model, so the grid of the image is unknown. Call the whole model, or use a scheme that "
                "acts in attention."
            )
        length = state.table_length(self.prefix_rows[name]) if length is None else length
        table = self.native(name)
        return self._encoded(length, table.device).to(table.dtype)

    def zeros_like_call(self, name: str) -> Tensor | None:
        """Zeros in the size of the call, for a table that is discarded; `None` if the size is unknown.

        Also `None` if the scheme adds vectors, or the stack has several tables.
        """
        state = self.runtime.states.top
        if self.additive is not None or not self.alone or not isinstance(state, GridState):
            return None
        if not state.is_known or state.sizes is not None:
            return None
        return self.native(name).new_zeros(1, state.table_length(self.prefix_rows[name]), self.hidden_size)

    def stands_in(self, name: str) -> bool:
        """Whether a table is replaced by something in the size of the call: vectors of the scheme, or zeros.

        Otherwise the table is zero, and the stock code resizes it.
        """
        acts = self.additive is not None or (not self.resizes and self.zeros_like_call(name) is not None)
        return acts and name == self.main and not self.resamples

    def _encoded(self, length: int, device: torch.device) -> Tensor:
        """`(batch or 1, length, hidden)`: the vectors of the scheme."""
        assert self.additive is not None
        state = self.runtime.states.top
        # Not shared with layers, because the grid of a call may be known better by then.
        tokens = self.runtime.state_for(length, device) if state is None else state.on(device).by_slots(length)
        return vectors(self.additive, tokens)

    def native(self, name: str) -> Tensor:
        """The table of the stock model."""
        value = getattr(self.module, name)
        weight = value.weight if isinstance(value, nn.Module) else value
        assert isinstance(weight, Tensor)
        return weight


class _EmbeddingView:
    """Stands in for an `nn.Embedding` that holds a table. It returns the vectors for any rows that are looked up."""

    def __init__(self, site: GridTableSite, name: str) -> None:
        self.site = site
        self.name = name

    def __call__(self, rows: Tensor) -> Tensor:
        """The vectors, in the shape of the looked up rows, which may be several for each patch."""
        if self.site.additive is None or not self.site.stands_in(self.name):
            table = self.site.native(self.name)
            looked_up: tuple[int, ...] = rows.shape
            if looked_up[-1] == table.shape[0] and self.site.stands_in(self.name):
                looked_up = (*rows.shape[:-1], self.site.vectors(self.name).shape[1])
            return table.new_zeros(*looked_up, table.shape[-1])
        vectors = self.site.vectors(self.name)
        length = vectors.shape[1]
        if rows.shape[-1] != length and rows.shape[0] == length and rows.dim() == 2:
            return vectors[0].unsqueeze(1).expand(*rows.shape, -1)
        return vectors if rows.dim() == 2 and rows.shape[0] == 1 else vectors.expand(*rows.shape, -1)

    @property
    def weight(self) -> Tensor:
        """`(rows, hidden)`: zeros, or the stock table, which only determines the arguments of a replaced method."""
        table = self.site.native(self.name)
        return table if self.site.stands_in(self.name) else torch.zeros_like(table)
