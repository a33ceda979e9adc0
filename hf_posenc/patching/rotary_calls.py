"""How an architecture's own rotary function is called, learnt from its signature and from probing it.

Transformers holds about ten variants of `apply_rotary_pos_emb`. They differ in which arguments are queries and
keys, in the axis order of those, in which dimensions form a pair and in whether the result is permuted. None of
that needs a table per model: the signature names the tensors, and unit vectors sent through the function show
the pairing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError

Layout = Literal["half", "half_reversed", "interleaved"]

_QUERY_NAMES = ("q", "xq", "query", "x", "tensor")
_KEY_NAMES = ("k", "xk", "key")
_PROBE_DIM = 8
_PROBE_HEADS = 3
_PROBE_LENGTH = 2


@dataclass(frozen=True)
class RotaryCall:
    """One rotary function.

    Args:
        query_name: parameter that holds queries (or either of the two, where `key_name` is `None`).
        key_name: parameter that holds keys, or `None` for a function that takes one tensor at a time.
        time_axis: axis of the tokens in those tensors unless the call says otherwise, 1 or 2.
        parameters: names of the function's parameters, in order.
    """

    query_name: str
    key_name: str | None
    time_axis: int
    parameters: tuple[str, ...]

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None, int]:
        """The query, the key (or `None`) and the token axis of one call."""
        if not kwargs and "unsqueeze_dim" not in self.parameters[: len(args)]:
            # As nearly every model calls it, for every layer and token.
            query, key = (self.parameters.index(name) for name in (self.query_name, self.key_name or self.query_name))
            return args[query], args[key] if self.key_name and key < len(args) else None, self.time_axis
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        axis = self.time_axis
        if "unsqueeze_dim" in given:
            axis = 2 if given["unsqueeze_dim"] in (1, -3) else 1
        return given[self.query_name], given.get(self.key_name) if self.key_name else None, axis


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
        raise UnsupportedError(
            f"The rotary function {getattr(function, '__name__', function)}{signature} takes no argument named "
            f"like a query ({', '.join(_QUERY_NAMES)}), so its tensors cannot be recognised. Declare the "
            "architecture with hf_posenc.register_architecture."
        )
    key = next((name for name in _KEY_NAMES if name in names), None)
    if "unsqueeze_dim" in names:
        time_axis = 2 if signature.parameters["unsqueeze_dim"].default in (1, -3) else 1
    elif "freqs_cis" in names:
        time_axis = _complex_time_axis(function)
    elif names[:3] == ["tensor", "sin", "cos"]:
        time_axis = 1
    else:
        raise UnsupportedError(
            f"The rotary function {getattr(function, '__name__', function)}{signature} does not say which axis of "
            "its tensors is time. Declare the architecture with hf_posenc.register_architecture."
        )
    return RotaryCall(query, key, time_axis, tuple(names))


def _complex_time_axis(function: Callable[..., Any]) -> int:
    frequencies = torch.ones(1, _PROBE_LENGTH, _PROBE_DIM // 2, dtype=torch.complex64)
    for axis, shape in ((1, (1, _PROBE_LENGTH, _PROBE_HEADS)), (2, (1, _PROBE_HEADS, _PROBE_LENGTH))):
        probe = torch.zeros(*shape, _PROBE_DIM)
        try:
            function(probe, probe, freqs_cis=frequencies)
        except (RuntimeError, AssertionError):
            continue
        return axis
    raise UnsupportedError(f"The complex rotary function {function} accepts neither axis order of its tensors.")


def rotary_output(module: torch.nn.Module, *, layer_type: str | None = None) -> tuple[str, int]:
    """What a rotary module returns and how many dimensions of a head it rotates.

    Returns:
        `("full" | "half_width" | "complex", rotary_dim)`; works on modules on the meta device.
    """
    frequencies = inverse_frequencies_of(module, layer_type)
    width = 2 * frequencies.shape[-1]
    hidden = torch.zeros(1, 1, 1, device=frequencies.device)
    position_ids = torch.zeros(1, 1, dtype=torch.int64, device=frequencies.device)
    arguments = (layer_type,) if layer_type is not None and has_layer_types(module) else ()
    output = ask_rotary(module, hidden, position_ids, *arguments)
    if isinstance(output, Tensor):
        return "complex", width
    return ("half_width" if output[0].shape[-1] * 2 == width else "full"), width


def ask_rotary(module: torch.nn.Module, hidden: Tensor, position_ids: Tensor, *arguments: Any) -> Any:
    """What the class of a rotary module returns for positions on one axis, whatever its instance was given since.

    Raises:
        UnsupportedError: if it takes other positions or arguments.
    """
    try:
        with torch.no_grad():
            return type(module).forward(module, hidden, position_ids, *arguments)
    except (TypeError, IndexError, RuntimeError) as error:
        raise UnsupportedError(
            f"{type(module).__name__} could not be asked for the phases of a token ({error}): its positions have more "
            "than one axis, or it takes other arguments. Declare the architecture with "
            "hf_posenc.register_architecture, or use a newer transformers."
        ) from error


def inverse_frequencies_of(module: torch.nn.Module, layer_type: str | None = None) -> Tensor:
    """The buffer a rotary module computes its phases from.

    Raises:
        UnsupportedError: if the module has no such buffer.
    """
    names = [f"{layer_type}_inv_freq"] if layer_type else []
    for name in (*names, "inv_freq"):
        value = getattr(module, name, None)
        if isinstance(value, Tensor):
            return value
    found = [name for name, _ in module.named_buffers()]
    raise UnsupportedError(
        f"{type(module).__name__} has no inverse frequencies (buffers: {', '.join(found) or 'none'}), so its rotary "
        "width is unknown. Declare the architecture with hf_posenc.register_architecture."
    )


def rotating_layer_types(module: torch.nn.Module) -> list[str]:
    """The layer types a rotary module holds frequencies for; empty for a module with one set for all, or with none."""
    names = [name.removesuffix("_inv_freq") for name, _ in module.named_buffers() if name.endswith("_inv_freq")]
    return [name for name in names if not name.endswith("original")]


def has_layer_types(module: torch.nn.Module) -> bool:
    """Whether a rotary module is asked for the phases of a layer type."""
    return "layer_type" in inspect.signature(type(module).forward).parameters


def has_inverse_frequencies(module: torch.nn.Module, layer_type: str | None) -> bool:
    """Whether `inverse_frequencies_of` finds any."""
    return hasattr(module, "inv_freq") or layer_type in rotating_layer_types(module)


@functools.lru_cache(maxsize=256)
def pairing(function: Callable[..., Any], output_kind: str) -> Layout:
    """Which dimensions a rotary function rotates together, and which way, found with unit vectors.

    With cos = 1, sin = 0 a linear function returns a permutation P of its input; with cos = 0, sin = 1 it returns
    P G, where G turns each pair by 90 degrees. So `inverse(P) (P G)` shows the pairs whatever the function
    permutes.

    Raises:
        UnsupportedError: for a pairing that is neither half, in either direction, nor interleaved.
    """
    identity, quarter = _probe(function, output_kind, 1.0, 0.0), _probe(function, output_kind, 0.0, 1.0)
    image = torch.linalg.solve(identity, quarter)[:, 0]
    half = _PROBE_DIM // 2
    layouts: tuple[tuple[Layout, int, float], ...] = (
        ("half", half, 1.0),
        ("half_reversed", half, -1.0),
        ("interleaved", 1, 1.0),
    )
    for layout, partner, direction in layouts:
        expected = torch.zeros(_PROBE_DIM)
        expected[partner] = direction
        if torch.allclose(image, expected, atol=1e-6):
            return layout
    raise UnsupportedError(
        f"The rotary function {getattr(function, '__name__', function)} turns dimension 0 into {image.tolist()}, which "
        "is neither the half nor the interleaved pairing. Declare the architecture with "
        "hf_posenc.register_architecture."
    )


def _probe(function: Callable[..., Any], output_kind: str, cosine: float, sine: float) -> Tensor:
    """`(head_dim, head_dim)`: column c is what the function makes of unit vector c."""
    call = rotary_call(function)
    unit = torch.eye(_PROBE_DIM)
    # One token per unit vector: tokens share the phase, so their order does not matter.
    tensor = unit.unsqueeze(0).unsqueeze(1 if call.time_axis == 2 else 2)
    width = _PROBE_DIM // 2 if output_kind in ("half_width", "complex") else _PROBE_DIM
    cos, sin = torch.full((1, _PROBE_DIM, width), cosine), torch.full((1, _PROBE_DIM, width), sine)
    arguments: dict[str, Any] = {call.query_name: tensor}
    if call.key_name:
        arguments[call.key_name] = tensor
    if "freqs_cis" in call.parameters:
        arguments["freqs_cis"] = torch.complex(cos, sin)
    elif call.query_name == "tensor":
        arguments |= {"sin": sin[..., : _PROBE_DIM // 2], "cos": cos[..., : _PROBE_DIM // 2]}
    else:
        arguments |= {"cos": cos, "sin": sin}
    try:
        output = function(**arguments)
    except (TypeError, IndexError, RuntimeError) as error:
        raise UnsupportedError(
            f"The rotary function {getattr(function, '__name__', function)}({', '.join(call.parameters)}) could not be "
            f"tried on {', '.join(arguments)} ({error}), so its pairing is unknown. Declare the architecture with "
            "hf_posenc.register_architecture."
        ) from error
    query = output[0] if isinstance(output, tuple) else output
    return query.reshape(_PROBE_DIM, _PROBE_DIM).transpose(0, 1)
