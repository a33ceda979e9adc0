"""Probing the rotary modules and functions of an architecture.

The functions differ in which dimensions form a pair and in whether they permute the result. Applying a function to unit
vectors shows both, so no table per model is needed. What a module rotates that looks its phases up in a table is read
from the phases of the first tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.forward_code import unknown_seam
from hf_posenc.patching.anatomy.rotary_call import COMPLEX_NAMES, rotary_call

Layout = Literal["half", "half_reversed", "interleaved"]

_PROBE_DIM = 8
Kind = Literal["full", "half_width", "complex"]
#: Allowed error of an angle, and of an angle per position: tables are computed in float32.
_ERROR, _ERROR_PER_POSITION = 1e-4, 2e-7


def rotary_output(module: torch.nn.Module, *, layer_type: str | None = None) -> tuple[str, int]:
    """The kind of phases that a rotary module returns, and the number of dimensions of a head that it rotates.

    Works on modules on the meta device.

    Returns:
        `("full" | "half_width" | "complex", rotary_dim)`.
    """
    if not has_inverse_frequencies(module, layer_type):
        kind, angles = angles_in(_first_phases(module, 2))
        return kind, 2 * angles.shape[-1]
    frequencies = inverse_frequencies_of(module, layer_type)
    width = 2 * frequencies.shape[-1]
    hidden = torch.zeros(1, 1, 1, device=frequencies.device)
    position_ids = torch.zeros(1, 1, dtype=torch.int64, device=frequencies.device)
    arguments = (layer_type,) if layer_type is not None and has_layer_types(module) else ()
    output = call_rotary(module, hidden, position_ids, *arguments)
    if isinstance(output, Tensor):
        return "complex", width
    return ("half_width" if output[0].shape[-1] * 2 == width else "full"), width


def call_rotary(module: torch.nn.Module, hidden: Tensor, position_ids: Tensor, *arguments: Any) -> Any:
    """Calls the forward of a rotary module's class with positions on one axis, ignoring a forward on the instance.

    Raises:
        UnsupportedError: if it requires other positions or arguments.
    """
    try:
        with torch.no_grad():
            return type(module).forward(module, hidden, position_ids, *arguments)
    except (TypeError, IndexError, RuntimeError) as error:
        raise unknown_seam(
            f"{type(module).__name__} could not compute the phases of a token ({error}): its positions have more than "
            "one axis, or it requires other arguments."
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
    return frequencies_of(module, angles_in(_first_phases(module, rows))[1])


def _first_phases(module: torch.nn.Module, length: int) -> Any:
    """What a rotary module without frequencies returns for the first tokens."""
    ids = torch.arange(length, device=next((buffer.device for buffer in module.buffers()), None)).unsqueeze(0)
    return call_rotary(module, torch.zeros(1, length, 1, device=ids.device), ids)


def rotating_layer_types(module: torch.nn.Module) -> list[str]:
    """The layer types for which a rotary module has separate frequencies; empty if it has one set, or none."""
    names = [name.removesuffix("_inv_freq") for name, _ in module.named_buffers() if name.endswith("_inv_freq")]
    return [name for name in names if not name.endswith("original")]


def has_layer_types(module: torch.nn.Module) -> bool:
    """Whether the forward of a rotary module takes a layer type."""
    return "layer_type" in inspect.signature(type(module).forward).parameters


def looks_phases_up(module: torch.nn.Module) -> bool:
    """Whether a rotary module stores no frequencies."""
    return not has_inverse_frequencies(module, None) and not rotating_layer_types(module)


def has_inverse_frequencies(module: torch.nn.Module, layer_type: str | None) -> bool:
    """Whether `inverse_frequencies_of` finds any."""
    return hasattr(module, "inv_freq") or layer_type in rotating_layer_types(module)


@functools.lru_cache(maxsize=256)
def pairing(function: Callable[..., Any], output_kind: str) -> Layout:
    """Which dimensions a rotary function rotates together, and in which direction, determined with unit vectors.

    With cos = 1, sin = 0 a linear function returns a permutation P of its input; with cos = 0, sin = 1 it returns
    P G, where G rotates each pair by 90 degrees. `inverse(P) (P G)` therefore shows the pairs even if the function
    permutes its output.

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
    raise unknown_seam(
        f"The rotary function {getattr(function, '__name__', function)} maps dimension 0 to {image.tolist()}, which is "
        "neither the half nor the interleaved pairing."
    )


def grid_pairing(function: Callable[..., Any]) -> Layout:
    """Same as `pairing` for a function whose phases may be as wide as a head or half as wide.

    Raises:
        UnsupportedError: as in `pairing`.
    """
    try:
        return pairing(function, "full")
    except UnsupportedError:
        return pairing(function, "half_width")


def _probe(function: Callable[..., Any], output_kind: str, cosine: float, sine: float) -> Tensor:
    """`(head_dim, head_dim)`: column c is the image of unit vector c."""
    call = rotary_call(function)
    unit = torch.eye(_PROBE_DIM)
    # One token per unit vector. All tokens have the same phase, so their order does not matter.
    phase_axes, tensor_axes = call.phase_shape
    tensor = unit.unsqueeze(0).unsqueeze(1 if call.time_axis == 2 else 2)
    tensor = tensor if tensor_axes == 4 else tensor.squeeze(0)
    width = _PROBE_DIM // 2 if output_kind in ("half_width", "complex") else _PROBE_DIM
    shape = (1, _PROBE_DIM, width)[3 - phase_axes :]
    cos, sin = torch.full(shape, cosine), torch.full(shape, sine)
    arguments: dict[str, Any] = {call.query_name: tensor}
    if call.key_name:
        arguments[call.key_name] = tensor
    complex_name = next((name for name in COMPLEX_NAMES if name in call.parameters), None)
    if complex_name is not None:
        arguments[complex_name] = torch.complex(cos, sin)
    elif call.query_name == "tensor":
        arguments |= {"sin": sin[..., : _PROBE_DIM // 2], "cos": cos[..., : _PROBE_DIM // 2]}
    else:
        arguments |= {"cos": cos, "sin": sin}
    try:
        output = function(**arguments)
    except (TypeError, IndexError, RuntimeError) as error:
        raise unknown_seam(
            f"The rotary function {getattr(function, '__name__', function)}({', '.join(call.parameters)}) could not be "
            f"called with {', '.join(arguments)} ({error}), so its pairing is unknown."
        ) from error
    query = output[0] if isinstance(output, tuple) else output
    return query.reshape(_PROBE_DIM, _PROBE_DIM).transpose(0, 1)


def cosines_in(output: Any) -> Tensor:
    """The cosines (or complex phases) among the phases of tokens from position 0 on. GPT-J returns sines first."""
    if isinstance(output, Tensor):
        return output
    first, second = output[:2]
    swapped = first.device.type != "meta" and not first[..., 0, :].any()
    found: Tensor = second if swapped else first
    return found


def angles_in(output: Any) -> tuple[Kind, Tensor]:
    """The kind of the phases of tokens from position 0 on, and the angles of all pairs, `(length, pairs)` float64.

    Phases are full if they contain each pair twice, and on the meta device, where no values show it.
    """
    cosines = cosines_in(output)
    if cosines.is_complex():
        return "complex", cosines[0].angle().double()
    sines = output[1] if cosines is output[0] else output[0]
    angles = torch.atan2(sines.double(), cosines.double())[0]
    pairs = angles.shape[-1] // 2
    for first, second in ((slice(pairs), slice(pairs, None)), (slice(None, None, 2), slice(1, None, 2))):
        # The last places of a row may be computed by other instructions, and differ in the last bit.
        if angles.device.type == "meta" or all(
            torch.allclose(one[..., first], one[..., second], rtol=0.0, atol=1e-5) for one in (cosines, sines)
        ):
            return "full", angles[:, first]
    return "half_width", angles


def frequencies_of(module: nn.Module, angles: Tensor) -> Tensor:
    """The frequencies of the angles of consecutive positions, `(pairs,)` float32 in radians per position.

    Raises:
        UnsupportedError: if some angle is not the product of position and frequency.
    """
    refuse_other_angles(module, angles, torch.arange(len(angles), device=angles.device), None)
    return (angles[1] - angles[0]).float()


def refuse_other_angles(module: nn.Module, angles: Tensor, ids: Tensor, stored: Tensor | None) -> None:
    """Refuses a rotary module whose angles do not grow by a frequency with each position.

    Args:
        module: the module.
        angles: `(length, pairs)` float64.
        ids: `(length,)`, the positions of the angles, from 0 and 1 on.
        stored: the inverse frequencies in the module; `None` if it stores none.

    Raises:
        UnsupportedError: if some angle is not the product of position and frequency, up to a constant.
    """
    frequencies = angles[1] - angles[0] if stored is None else stored.double()
    grown = angles - angles[0] - ids.unsqueeze(-1) * frequencies
    difference = torch.polar(torch.ones_like(grown), grown).angle()
    if (difference.abs() > _ERROR + _ERROR_PER_POSITION * ids.unsqueeze(-1)).any():
        stores, of = ("no", "fixed") if stored is None else ("other", "its")
        raise unknown_seam(
            f"{type(module).__name__} stores {stores} inverse frequencies: its phases are not those of a rotation with "
            f"{of} frequencies, in float32."
        )
