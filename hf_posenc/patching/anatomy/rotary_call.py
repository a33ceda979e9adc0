"""The calling convention of an architecture's rotary function, read from its signature.

Transformers has about ten variants of `apply_rotary_pos_emb`. They differ in which arguments are queries and keys, and
in the axis order of those tensors. The signature names the tensors, so no table per model is needed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.forward_code import unknown_seam

#: Names of arguments with complex phases.
COMPLEX_NAMES = ("freqs_cis", "freqs_ci")
_QUERY_NAMES = ("q", "xq", "query", "x", "tensor")
_KEY_NAMES = ("k", "xk", "key")
_VALUE_NAMES = frozenset(("v", "xv", "value"))
_PROBE_DIM = 8
_PROBE_HEADS = 3
_PROBE_LENGTH = 2


@dataclass(frozen=True)
class RotaryCall:
    """One rotary function.

    Args:
        query_name: parameter that holds queries (or either of the two, where `key_name` is `None`).
        key_name: parameter that holds keys, or `None` for a function that takes one tensor at a time.
        time_axis: axis of the tokens in those tensors unless the call says otherwise, 1 or 2. Tensors without a batch
            have one axis less.
        parameters: names of the function's parameters, in order.
        phase_shape: number of axes of the phases, 2 without a batch, and of one of the tensors, as the function takes
            them.
        other_axes: axis of the tokens by `phase_shape`, if it is not always the same.
    """

    query_name: str
    key_name: str | None
    time_axis: int
    parameters: tuple[str, ...]
    phase_shape: tuple[int, int] = (3, 4)
    other_axes: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def phases(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The cosines, or complex phases, of one call."""
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        return next((given[name] for name in ("cos", *COMPLEX_NAMES) if name in given), None)

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None, int]:
        """The query, the key (or `None`) and the token axis of one call."""
        if not kwargs and "unsqueeze_dim" not in self.parameters[: len(args)]:
            # Fast path: nearly all models call it this way, in every layer for every token.
            query, names = args[self.parameters.index(self.query_name)], self.parameters
            axis = self._axis(query, args, kwargs) if self.other_axes else self.time_axis
            key = names.index(self.key_name) if self.key_name else len(args)
            return query, args[key] if key < len(args) else None, axis
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        axis = self._axis(given[self.query_name], args, kwargs) if self.other_axes else self.time_axis
        if "unsqueeze_dim" in given:
            # The new axis is that of the heads: behind the tokens, or before them.
            axes = given["cos"].dim() + 1 if isinstance(given.get("cos"), Tensor) else 4
            axis = 1 if given["unsqueeze_dim"] % axes == axes - 2 else 2
        return given[self.query_name], given.get(self.key_name) if self.key_name else None, axis

    def _axis(self, query: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        phases = self.phases(args, kwargs)
        return self.other_axes.get((phases.dim(), query.dim()), self.time_axis)


@functools.lru_cache(maxsize=256)
def rotary_call(function: Callable[..., Any]) -> RotaryCall:
    """Reads the signature of a rotary function and finds its axis order.

    Raises:
        UnsupportedError: for a signature in which queries and keys cannot be told apart.
    """
    signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    names = list(signature.parameters)
    query = next((name for name in _QUERY_NAMES if name in names), None)
    if query is None:
        raise unknown_seam(
            f"The rotary function {getattr(function, '__name__', function)}{signature} takes no argument with the name "
            f"of a query ({', '.join(_QUERY_NAMES)}), so its tensors cannot be recognised."
        )
    if not _VALUE_NAMES.isdisjoint(names):
        raise UnsupportedError(
            f"The rotary function {getattr(function, '__name__', function)}{signature} rotates values too, "
            "which no scheme of this library does."
        )
    key = next((name for name in _KEY_NAMES if name in names), None)
    if "unsqueeze_dim" in names:
        time_axis = 2 if signature.parameters["unsqueeze_dim"].default in (1, -3) else 1
    elif any(name in names for name in COMPLEX_NAMES) or {"cos", "sin"} <= set(names):
        axes = _observed_axes(function, names, query, key)
        phase_shape, time_axis = next(iter(axes.items()))
        other_axes = {} if len(set(axes.values())) == 1 else axes
        return RotaryCall(query, key, time_axis, tuple(names), phase_shape, other_axes)
    elif names[:3] == ["tensor", "sin", "cos"]:
        time_axis = 1
    else:
        raise unknown_seam(
            f"The rotary function {getattr(function, '__name__', function)}{signature} does not show which axis of its "
            "tensors is time."
        )
    return RotaryCall(query, key, time_axis, tuple(names))


def _observed_axes(
    function: Callable[..., Any], names: list[str], query: str, key: str | None
) -> dict[tuple[int, int], int]:
    """The axis of the tokens by the numbers of axes of the phases and of a tensor, where the function works.

    The phases of the last token are zero, so its part of the result is zero, and only that part.
    """
    name = next((name for name in COMPLEX_NAMES if name in names), None)
    axes: dict[tuple[int, int], int] = {}
    for phase_axes, tensor_axes, axis, full in itertools.product((3, 2), (4, 3), (1, 2), (True, False)):
        shape = (_PROBE_LENGTH, _PROBE_HEADS) if axis == 1 else (_PROBE_HEADS, _PROBE_LENGTH)
        probe = torch.ones(*(1,) * (tensor_axes - 3), *shape, _PROBE_DIM)
        width = _PROBE_DIM if full and name is None else _PROBE_DIM // 2
        phases = torch.ones(*(1,) * (phase_axes - 2), _PROBE_LENGTH, width)
        phases[..., -1, :] = 0
        given: dict[str, Any] = {query: probe} | ({key: probe} if key else {})
        given |= {"cos": phases, "sin": phases * 0} if name is None else {name: phases.to(torch.complex64)}
        try:
            found = function(**given)
        except (RuntimeError, AssertionError, ValueError, IndexError):
            continue
        first = found[0] if isinstance(found, tuple) else found
        expected = probe.clone()
        expected.select(axis - 4, -1).zero_()
        if first.shape == probe.shape and torch.equal(first, expected):
            axes.setdefault((phase_axes, tensor_axes), axis)
    if not axes:
        raise unknown_seam(
            f"The rotary function {getattr(function, '__name__', function)}({', '.join(names)}) accepts no known order "
            "of the axes of its tensors."
        )
    return axes
