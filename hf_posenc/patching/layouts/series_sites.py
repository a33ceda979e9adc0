"""Modules in which positions act in a stack that reads a series of features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.parts import SOURCE_LENGTH
from hf_posenc.patching.anatomy.tables import table_origin
from hf_posenc.patching.call.length_checks import check_cache
from hf_posenc.patching.call.placed_forward import PlacedForward
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.call.view import Viewed, WithOverrides, view_of
from hf_posenc.schemes.parts import AdditiveEncoding

if TYPE_CHECKING:
    from hf_posenc.patching.layouts.series import FixedInput


class InputView(Viewed):
    """Runs an encoder that accepts one number of frames only with as many as a call has.

    Such an encoder adds all rows of its position table to its tokens, and raises an error unless the config says that
    there are as many. In its view, the table and the config state the number of tokens of this call.

    Args:
        module: the encoder.
        found: what fixes its number of tokens.
        runtime: its runtime, which knows the number of tokens of the call in progress.
    """

    def __init__(self, module: Any, found: FixedInput, runtime: StackRuntime) -> None:
        self.module = module
        self.found = found
        self.runtime = runtime

    @property
    def tokens(self) -> int:
        """Number of tokens of the call in progress."""
        return int(getattr(self.runtime.state, "expected"))  # noqa: B009

    def replaced(self) -> dict[str, Any]:
        """The config and the table."""
        return {
            "config": property(lambda _: WithOverrides(self.module.config, **{SOURCE_LENGTH: self.tokens})),
            self.found.table: property(lambda _: _WholeTable(getattr(self.module, self.found.table), self.tokens)),
        }


class _WholeTable:
    """A table with a row for every token of the call. Its rows are looked up in the patched table."""

    def __init__(self, table: Any, tokens: int) -> None:
        self.table = table
        self.num_embeddings = tokens

    def __call__(self, rows: Tensor) -> Any:
        return self.table(rows)

    @property
    def weight(self) -> Tensor:
        """`(tokens, hidden)`, or one row of zeros for no vectors."""
        origin = table_origin(self.table)
        device = next(self.table.parameters()).device
        rows: Tensor = self.table(torch.arange(origin, origin + self.num_embeddings, device=device))
        return rows.squeeze(0)


class _Vectors(PlacedForward):
    """Base class: stands in for the `forward` of a module that makes or adds vectors, with those of the scheme."""

    def __init__(self, found: Any, runtime: StackRuntime, additive: AdditiveEncoding | None) -> None:
        super().__init__(found.module, runtime)
        self.found = found
        self.additive = additive

    def vectors(self, length: int, like: Tensor) -> Tensor:
        """`(batch or 1, length, hidden)` in the dtype of `like`; zeros without an additive part."""
        if self.additive is None:
            return like.new_zeros(()).expand(1, length, like.shape[-1])
        state = self.runtime.state_for(length, like.device)
        check_cache(self.additive, state)
        encoded: Tensor = state.own(self.additive)(state.positions())
        return encoded.to(like.dtype)


class ConvolutionSite(_Vectors):
    """Stands in for a convolution over neighbouring embeddings whose output is added to them.

    With a stride it takes and returns `(batch, hidden, length)`, otherwise `(batch, length, hidden)`.
    """

    def __call__(self, hidden_states: Tensor) -> Any:
        """Returns one vector per token, in the axis order of the convolution."""
        if self.retired:
            return self.stock(hidden_states)
        if self.found.stride == 1:
            return self.vectors(hidden_states.shape[1], hidden_states)
        by_token = hidden_states.transpose(1, 2)
        return self.vectors(by_token.shape[1] // self.found.stride, by_token).transpose(1, 2)


class LengthSite(_Vectors):
    """Stands in for a module that computes sinusoids from a length."""

    def __call__(self, seq_length: int | None = None, **kwargs: Any) -> Any:
        """Returns `(1, seq_length, hidden)`."""
        if self.retired:
            return self.stock(seq_length, **kwargs)
        if seq_length is None or any(value is not None for value in kwargs.values()):
            raise UnsupportedError(
                f"{type(self.module).__name__} was called with {', '.join(kwargs) or 'nothing'} and not with a length, "
                "so the positions of its vectors are unknown."
            )
        return self.vectors(seq_length, self.stock(1))


class ParameterSite(_Vectors):
    """Stands in for a module that adds a parameter with a row per token: the module finds the vectors in its place."""

    def __call__(self, embeddings: Tensor) -> Any:
        """`embeddings` are `(..., length, hidden)`."""
        if self.retired or self.inner is not None:
            return self.stock(embeddings)
        rows = self.vectors(embeddings.shape[-2] + self.found.prefix_rows, embeddings)
        rows = rows if self.found.value.dim() == 3 else rows.squeeze(0)
        return type(self.module).forward(view_of(self.module, {self.found.name: rows}), embeddings)
