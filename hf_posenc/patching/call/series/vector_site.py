"""Modules and parameters whose vectors are added to the embeddings of a series, replaced by those of the scheme."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.length_checks import check_cache
from hf_posenc.patching.call.placed_forward import PlacedForward
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.find.offloading import onload_weights
from hf_posenc.patching.find.series.found import ParameterTable, VectorModule
from hf_posenc.schemes.parts import AdditiveEncoding


class _Vectors(PlacedForward):
    """Base class: the vectors of the scheme for a number of tokens."""

    runtime: StackRuntime
    additive: AdditiveEncoding | None

    def vectors(self, length: int, like: Tensor) -> Tensor:
        """`(batch or 1, length, hidden)` in the dtype of `like`; zeros without an additive part."""
        if self.additive is None:
            return like.new_zeros(()).expand(1, length, like.shape[-1])
        state = self.runtime.state_for(length)
        check_cache(self.additive, state)
        with onload_weights(self.additive):
            encoded: Tensor = self.additive(state.positions(like.device))
        return encoded.to(like.dtype)


class ConvolutionSite(_Vectors):
    """Stands in for the `forward` of a convolution over neighbouring embeddings whose output is added to them.

    Args:
        found: the convolution. With a stride it takes and returns `(batch, hidden, length)`, otherwise `(batch, length,
            hidden)`.
        runtime: the runtime of its stack.
        additive: the scheme's part, or `None` for no vectors here.
    """

    def __init__(self, found: VectorModule, runtime: StackRuntime, additive: AdditiveEncoding | None) -> None:
        self.module = found.module
        self.stride = found.stride
        self.runtime = runtime
        self.additive = additive

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Returns one vector per token, in the axis order of the convolution."""
        if self.retired:
            stock: Tensor = self.stock(hidden_states)
            return stock
        if self.stride == 1:
            return self.vectors(hidden_states.shape[1], hidden_states)
        by_token = hidden_states.transpose(1, 2)
        return self.vectors(by_token.shape[1] // self.stride, by_token).transpose(1, 2)


class LengthSite(_Vectors):
    """Stands in for the `forward` of a module that computes sinusoids from a length.

    Args:
        found: the module, whose forward takes `seq_length`.
        runtime: the runtime of its stack.
        additive: the scheme's part, or `None` for no vectors here.
    """

    def __init__(self, found: VectorModule, runtime: StackRuntime, additive: AdditiveEncoding | None) -> None:
        self.module = found.module
        self.runtime = runtime
        self.additive = additive

    def __call__(self, seq_length: int | None = None, **kwargs: Any) -> Tensor:
        """Returns `(1, seq_length, hidden)`."""
        if self.retired:
            retired: Tensor = self.stock(seq_length, **kwargs)
            return retired
        if seq_length is None or any(value is not None for value in kwargs.values()):
            raise UnsupportedError(
                f"{type(self.module).__name__} was called with {', '.join(kwargs) or 'nothing'} and not with a length, "
                "so the positions of its vectors are unknown."
            )
        stock: Tensor = self.stock(1)
        return self.vectors(seq_length, stock)


class ParameterSite(_Vectors):
    """Stands in for the `forward` of a module that adds a parameter with a row per token to its input.

    The module runs its own forward with another `self`: a view that shares all its attributes, except that the
    parameter is the vectors of the call.

    Args:
        table: the parameter.
        runtime: the runtime of its stack.
        additive: the scheme's part, or `None` for no vectors.
    """

    def __init__(self, table: ParameterTable, runtime: StackRuntime, additive: AdditiveEncoding | None) -> None:
        self.module = table.module
        self.name = table.name
        self.extra_rows = table.extra_rows
        self.dimensions = getattr(table.module, table.name).dim()
        self.runtime = runtime
        self.additive = additive

    def __call__(self, embeddings: Tensor) -> Any:
        """`embeddings` are `(..., length, hidden)`."""
        if self.retired or self.inner is not None:
            return self.stock(embeddings)
        rows = self.vectors(embeddings.shape[-2] + self.extra_rows, embeddings)
        rows = rows if self.dimensions == 3 else rows.squeeze(0)
        kind: Any = type(self.module)
        view: Any = type(f"{kind.__name__}WithScheme", (kind,), {self.name: rows})
        seen = view.__new__(view)
        object.__setattr__(seen, "__dict__", self.module.__dict__)
        return kind.forward(seen, embeddings)


def site_of(found: VectorModule, runtime: StackRuntime, additive: AdditiveEncoding | None) -> _Vectors:
    """The replacement of the forward of a module whose output is added to the embeddings."""
    kind = ConvolutionSite if found.kind == "convolution" else LengthSite
    return kind(found, runtime, additive)


def weights_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owner and name of every parameter below a module."""
    return [(owner, name) for owner in module.modules() for name in owner._parameters]
