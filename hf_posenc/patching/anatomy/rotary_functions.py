"""The rotary modules and functions of an architecture: how they are called, and what they rotate.

Transformers has about ten variants of `apply_rotary_pos_emb`. They differ in which arguments are queries and keys, in
the axis order of those tensors, in which dimensions form a pair, and in whether they permute the result. The signature
names the tensors, and applying a function to unit vectors shows the rest, so no table per model is needed. If a
module looks its phases up in a table, its rotation is read from the phases of the first tokens.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.forwards import parameters_of, unknown_seam, written_in

Layout = Literal["half", "half_reversed", "interleaved"]
#: Allowed error of an angle, and of an angle per position: tables are computed in float32.
_ERROR, _ERROR_PER_POSITION = 1e-4, 2e-7
#: Number of axes of the positions of M-RoPE.
AXES = 3
#: Names of arguments with complex phases.
COMPLEX_NAMES = ("freqs_cis", "freqs_ci")
#: The argument by which modules compute phases, and functions look them up in a table.
POSITIONS = "position_ids"
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
        phase_shape: number of axes of the phases (2 without a batch) and of one of the tensors in a call.
        other_axes: axis of the tokens by `phase_shape`, if it is not always the same.
        looks_up: whether its phases are tables, whose rows it looks up by `position_ids`, as before transformers 4.38.
    """

    query_name: str
    key_name: str | None
    time_axis: int
    parameters: tuple[str, ...]
    phase_shape: tuple[int, int] = (3, 4)
    other_axes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    looks_up: bool = False
    #: Whether the first two parameters are the query and the key.
    begins_with_heads: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "begins_with_heads", self.parameters[:2] == (self.query_name, self.key_name))

    def phases(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The cosines, or complex phases, of one call."""
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        phases = next((given[name] for name in ("cos", *COMPLEX_NAMES) if name in given), None)
        return rows_at(phases, given[POSITIONS]) if self.looks_up and phases is not None else phases

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
            # The new axis is that of the heads, after the tokens or before them.
            axes = given["cos"].dim() + 1 if isinstance(given.get("cos"), Tensor) and not self.looks_up else 4
            axis = 1 if given["unsqueeze_dim"] % axes == axes - 2 else 2
        return given[self.query_name], given.get(self.key_name) if self.key_name else None, axis

    def _axis(self, query: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        phases = self.phases(args, kwargs)
        return self.other_axes.get((phases.dim(), query.dim()), self.time_axis)


@functools.lru_cache(maxsize=256)
def rotary_call(function: Callable[..., Any]) -> RotaryCall:
    """Reads the signature of a rotary function and finds its axis order.

    Raises:
        UnsupportedError: for a signature in which queries and keys cannot be distinguished.
    """
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except ValueError as error:  # A function of torch.jit.script, or of a C extension.
        raise unknown_seam(
            f"The rotary function {getattr(function, '__name__', function)} has no signature in Python ({error}), so "
            "it is unknown which tensors it rotates.",
            function,
        ) from error
    names = list(signature.parameters)
    query = next((name for name in _QUERY_NAMES if name in names), None)
    if query is None:
        raise unknown_seam(
            f"The rotary function {getattr(function, '__name__', function)}{signature} has no argument with the name "
            f"of a query ({', '.join(_QUERY_NAMES)}), so its tensors cannot be recognised.",
            function,
        )
    if not _VALUE_NAMES.isdisjoint(names):
        raise UnsupportedError(
            f"The rotary function {getattr(function, '__name__', function)}{signature} rotates values too, "
            "which no scheme of this library does."
        )
    key = next((name for name in _KEY_NAMES if name in names), None)
    needs_positions = POSITIONS in names and signature.parameters[POSITIONS].default is inspect.Parameter.empty
    if "unsqueeze_dim" in names and not needs_positions:
        time_axis = 2 if signature.parameters["unsqueeze_dim"].default in (1, -3) else 1
    elif any(name in names for name in COMPLEX_NAMES) or {"cos", "sin"} <= set(names):
        looks_up = needs_positions and bool(_observed_axes(function, names, query, key, looks_up=True))
        axes = _observed_axes(function, names, query, key, looks_up=looks_up)
        if not axes:
            raise unknown_seam(
                f"The rotary function {getattr(function, '__name__', function)}({', '.join(names)}) accepts no known "
                "order of the axes of its tensors, or requires other arguments.",
                function,
            )
        phase_shape, time_axis = next(iter(axes.items()))
        other_axes = {} if len(set(axes.values())) == 1 else axes
        return RotaryCall(query, key, time_axis, tuple(names), phase_shape, other_axes, looks_up)
    else:
        raise unknown_seam(
            f"The rotary function {getattr(function, '__name__', function)}{signature} does not show which axis of its "
            "tensors is time.",
            function,
        )
    return RotaryCall(query, key, time_axis, tuple(names))


def _observed_axes(
    function: Callable[..., Any], names: list[str], query: str, key: str | None, *, looks_up: bool
) -> dict[tuple[int, int], int]:
    """Maps the numbers of axes of the phases and of a tensor to the axis of the tokens, if the function accepts them.

    The phases of the last token are zero, so its part of the result is zero, and only that part. In tables, where the
    tokens are looked up in reverse order, they are the first row.
    """
    name = next((name for name in COMPLEX_NAMES if name in names), None)
    axes: dict[tuple[int, int], int] = {}
    phase_shapes = (2, 4) if looks_up else (3, 2)
    for phase_axes, tensor_axes, axis, full in itertools.product(phase_shapes, (4, 3), (1, 2), (True, False)):
        shape = (_PROBE_LENGTH, _PROBE_HEADS) if axis == 1 else (_PROBE_HEADS, _PROBE_LENGTH)
        probe = torch.ones(*(1,) * (tensor_axes - 3), *shape, _PROBE_DIM)
        width = _PROBE_DIM if full and name is None else _PROBE_DIM // 2
        phases = torch.ones(*(1,) * (phase_axes - 2), _PROBE_LENGTH, width)
        phases[..., 0 if looks_up else -1, :] = 0
        given: dict[str, Any] = {query: probe} | ({key: probe} if key else {})
        given |= {"cos": phases, "sin": phases * 0} if name is None else {name: phases.to(torch.complex64)}
        given |= {POSITIONS: torch.arange(_PROBE_LENGTH).flip(0).unsqueeze(0)} if POSITIONS in names else {}
        try:
            result = function(**given)
        except (RuntimeError, AssertionError, ValueError, IndexError, TypeError):
            continue
        first = result[0] if isinstance(result, tuple) else result
        expected = probe.clone()
        expected.select(axis - 4, -1).zero_()
        if first.shape == probe.shape and torch.equal(first, expected):
            axes.setdefault((phase_axes, tensor_axes), axis)
    return axes


def rows_at(table: Tensor, position_ids: Tensor) -> Tensor:
    """The rows of a table of phases, `(..., rows, width)`, at some positions."""
    return table.reshape(-1, table.shape[-1])[position_ids]


def call_rotary(module: torch.nn.Module, hidden: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Calls the forward of a rotary module's class with positions on one axis, ignoring a forward on the instance.

    A module that has one spectrum for all layers does not receive the layer type.

    Raises:
        UnsupportedError: if it requires other positions or arguments.
    """
    typed = (layer_type,) if layer_type is not None and has_layer_types(module) else ()
    try:
        with torch.no_grad():
            if returns_tables(module):
                tables = type(module).forward(module, hidden, seq_len=int(position_ids.max()) + 1)
                return tuple(rows_at(table, position_ids) for table in tables)
            return type(module).forward(module, hidden, position_ids, *typed)
    except (TypeError, IndexError, RuntimeError) as error:
        raise unknown_seam(
            f"{type(module).__name__} could not compute the phases of a token ({error}): its positions have more than "
            "one axis, or it requires other arguments.",
            module,
        ) from error


def inverse_frequencies_of(module: torch.nn.Module, layer_type: str | None = None) -> Tensor:
    """The buffer from which a rotary module computes its phases, or the frequencies of the phases that it looks up.

    Raises:
        UnsupportedError: if the module has no such buffer, and its phases have no fixed frequencies.
    """
    names = [f"{layer_type}_inv_freq"] if layer_type else []
    for name in (*names, "inv_freq"):
        value = getattr(module, name, None)
        if isinstance(value, Tensor):
            return value
    rows = max((size for buffer in module.buffers() for size in buffer.shape[:-1]), default=2)
    angles = first_angles(module, rows)
    refuse_other_angles(module, angles, torch.arange(rows, device=angles.device), None)
    return (angles[1] - angles[0]).float()


def first_angles(module: torch.nn.Module, length: int) -> Tensor:
    """The angles of a rotary module without frequencies for the first tokens, `(length, pairs)` float64."""
    ids = torch.arange(length, device=next((buffer.device for buffer in module.buffers()), None)).unsqueeze(0)
    return angles_in(call_rotary(module, torch.zeros(1, length, 1, device=ids.device), ids))


def rotating_layer_types(module: torch.nn.Module) -> list[str]:
    """The layer types for which a rotary module has separate frequencies; empty if it has one set, or none."""
    names = [name.removesuffix("_inv_freq") for name, _ in module.named_buffers() if name.endswith("_inv_freq")]
    return [name for name in names if not name.endswith("original")]


def has_layer_types(module: torch.nn.Module) -> bool:
    """Whether the forward of a rotary module takes a layer type."""
    return "layer_type" in inspect.signature(type(module).forward).parameters


def returns_tables(module: torch.nn.Module) -> bool:
    """Whether a rotary module returns the phases of all tokens, up to the optional length of its call."""
    length = parameters_of(type(module).forward).get("seq_len")
    return length is not None and length.default is None and POSITIONS not in parameters_of(type(module).forward)


def looks_phases_up(module: torch.nn.Module) -> bool:
    """Whether a rotary module stores no frequencies."""
    return not has_inverse_frequencies(module, None) and not rotating_layer_types(module)


def has_inverse_frequencies(module: torch.nn.Module, layer_type: str | None) -> bool:
    """Whether `inverse_frequencies_of` finds any."""
    return hasattr(module, "inv_freq") or layer_type in rotating_layer_types(module)


@functools.lru_cache(maxsize=256)
def pairing(function: Callable[..., Any]) -> Layout:
    """Which dimensions a rotary function rotates together, and in which direction, determined with unit vectors.

    With cos = 1, sin = 0 a linear function returns a permutation P of its input; with cos = 0, sin = 1 it returns
    P G, where G rotates each pair by 90 degrees. `inverse(P) (P G)` shows the pairs even if the output is permuted.
    The function is tried with phases as wide as a head, then half as wide.

    Raises:
        UnsupportedError: for a pairing that is neither half, in either direction, nor interleaved.
    """
    try:
        return _pairing_with(_PROBE_DIM, function)
    except UnsupportedError as error:
        try:
            return _pairing_with(_PROBE_DIM // 2, function)
        except UnsupportedError:
            raise error from None


def _pairing_with(width: int, function: Callable[..., Any]) -> Layout:
    """`pairing` with phases of one width."""
    identity, quarter = _probe(function, width, 1.0, 0.0), _probe(function, width, 0.0, 1.0)
    is_permutation = torch.equal(identity @ identity.T, torch.eye(_PROBE_DIM)) and bool((identity >= 0).all())
    places, half = torch.arange(_PROBE_DIM), _PROBE_DIM // 2
    layouts: tuple[tuple[Layout, Tensor, float], ...] = (
        ("half", places.view(2, half), 1.0),
        ("half_reversed", places.view(2, half), -1.0),
        ("interleaved", places.view(half, 2).T, 1.0),
    )
    for layout, (first, second), direction in layouts if is_permutation else ():
        expected = torch.zeros(_PROBE_DIM, _PROBE_DIM)
        expected[second, first], expected[first, second] = direction, -direction
        if torch.allclose(identity @ expected, quarter, atol=1e-6):
            return layout
    name = f"{written_in(function)}.{getattr(function, '__name__', function)}"
    raise unknown_seam(
        f"The rotary function {name} does not rotate the pairs of a layout (half, interleaved), or does more than "
        f"that: with cosine 1 and sine 0 it maps dimension 0 to {identity[:, 0].tolist()}, with cosine 0 and sine 1 to "
        f"{quarter[:, 0].tolist()}. A scheme replaces this function, so its other effects would be lost.",
        function,
    )


def _probe(function: Callable[..., Any], width: int, cosine: float, sine: float) -> Tensor:
    """`(head_dim, head_dim)`: column c is the image of unit vector c."""
    call = rotary_call(function)
    unit = torch.eye(_PROBE_DIM)
    # One token per unit vector. All tokens have the same phase, so their order does not matter.
    phase_axes, tensor_axes = call.phase_shape
    tensor = unit.unsqueeze(0).unsqueeze(1 if call.time_axis == 2 else 2)
    tensor = tensor if tensor_axes == 4 else tensor.squeeze(0)
    shape = (*(1,) * (phase_axes - 2), _PROBE_DIM, width)
    cos, sin = torch.full(shape, cosine), torch.full(shape, sine)
    arguments: dict[str, Any] = {call.query_name: tensor}
    if call.key_name:
        arguments[call.key_name] = tensor
    complex_name = next((name for name in COMPLEX_NAMES if name in call.parameters), None)
    if complex_name is not None:
        arguments[complex_name] = torch.complex(cos, sin)
    else:
        arguments |= {"cos": cos, "sin": sin}
    if call.looks_up:
        arguments[POSITIONS] = torch.zeros(1, _PROBE_DIM, dtype=torch.long)
    try:
        output = function(**arguments)
    except (TypeError, IndexError, RuntimeError) as error:
        raise unknown_seam(
            f"The rotary function {getattr(function, '__name__', function)}({', '.join(call.parameters)}) could not be "
            f"called with {', '.join(arguments)} ({error}), so its pairing is unknown.",
            function,
        ) from error
    query, key = output[:2] if isinstance(output, tuple) else (output, output)
    if not torch.equal(query, key):
        name = f"{written_in(function)}.{getattr(function, '__name__', function)}"
        raise unknown_seam(
            f"The rotary function {name} maps queries and keys differently, which no scheme does.", function
        )
    return query.reshape(_PROBE_DIM, _PROBE_DIM).transpose(0, 1)


def cosines_in(output: Any) -> Tensor:
    """The cosines (or complex phases) among the phases of tokens from position 0 on. GPT-J returns sines first."""
    if isinstance(output, Tensor):
        return output
    first, second = output[:2]
    swapped = first.device.type != "meta" and not first[..., 0, :].any()
    return second if swapped else first


def angles_in(output: Any) -> Tensor:
    """The angles of all pairs in the phases of tokens from position 0 on, `(length, pairs)` float64.

    Phases as wide as a head hold each pair twice. On the meta device, where no values show it, all phases count as
    such.
    """
    cosines = cosines_in(output)
    if cosines.is_complex():
        return cosines[0].angle().double()
    sines = output[1] if cosines is output[0] else output[0]
    angles = torch.atan2(sines.double(), cosines.double())[0]
    pairs = angles.shape[-1] // 2
    for first, second in ((slice(pairs), slice(pairs, None)), (slice(None, None, 2), slice(1, None, 2))):
        # The last places of a row may be computed by other instructions, and differ in the last bit.
        both = ((factors[..., first], factors[..., second]) for factors in (cosines, sines))
        if angles.device.type == "meta" or all(torch.allclose(*pair, rtol=0.0, atol=1e-5) for pair in both):
            return angles[:, first]
    return angles


def refuse_other_angles(module: nn.Module, angles: Tensor, ids: Tensor, stored: Tensor | None) -> None:
    """Refuses a rotary module whose angles do not grow by a frequency with each position.

    Args:
        module: the module.
        angles: `(length, pairs)` float64.
        ids: `(length,)`, the positions of the angles, from 0 and 1 on.
        stored: the inverse frequencies in the module; `None` if it stores none.
    """
    frequencies = angles[1] - angles[0] if stored is None else stored.double()
    grown = angles - angles[0] - ids.unsqueeze(-1) * frequencies
    difference = torch.polar(torch.ones_like(grown), grown).angle()
    if (difference.abs() > _ERROR + _ERROR_PER_POSITION * ids.unsqueeze(-1)).any():
        stores, of = ("no", "fixed") if stored is None else ("other", "its")
        raise unknown_seam(
            f"{type(module).__name__} stores {stores} inverse frequencies: its phases are not those of a rotation with "
            f"{of} frequencies, in float32.",
            module,
        )


def number_of_axes(rotary: Any, layer_type: str | None) -> int:
    """The number of axes of the positions that a rotary module reads; 1 for ordinary RoPE."""
    sections = getattr(rotary, "mrope_section", None)
    if isinstance(sections, dict):
        sections = sections.get(layer_type) if layer_type in sections else next(iter(sections.values()), None)
    return 1 if sections is None else len(sections)
