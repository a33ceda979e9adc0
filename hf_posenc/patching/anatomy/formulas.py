"""The formulas of native mechanisms: the frequencies of rotary modules, and the sinusoids of tables."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PositionEncodingError
from hf_posenc.patching.anatomy.architectures.declaration import undescribed
from hf_posenc.patching.anatomy.rotary_functions import (
    AXES,
    angles_in,
    call_rotary,
    cosines_in,
    has_layer_types,
    inverse_frequencies_of,
    number_of_axes,
    refuse_other_angles,
    returns_tables,
)
from hf_posenc.patching.anatomy.sites import FixedTable
from hf_posenc.patching.anatomy.weights import copied, onload_weights
from hf_posenc.patching.forwards import forward_parameters
from hf_posenc.schemes import RopeConfig, SinusoidalConfig
from hf_posenc.schemes.additive.sinusoidal import LAYOUTS
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import AdditiveEncoding
from hf_posenc.schemes.positions import Positions

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Stack

#: Number of positions up to which the phases of a module with fixed frequencies are compared.
_FAR = 5000


@dataclass
class Spectrum:
    """The frequencies of a rotary module for sequences of one length.

    Args:
        length: number of tokens.
        frequencies: `(pairs,)` float32, in radians per position.
        scaling: factor of cosine and sine.
    """

    length: int
    frequencies: Tensor
    scaling: float

    @property
    def rounded(self) -> bool:
        """Whether a half-precision dtype can represent all frequencies, as in a model that was cast."""
        exact = self.frequencies
        return any(torch.equal(exact, exact.to(dtype).float()) for dtype in (torch.bfloat16, torch.float16))


def phases_of(module: nn.Module, hidden: Tensor, position_ids: Tensor, layer_type: str | None) -> Tensor | None:
    """The cosines (or complex phases) of a rotary module, `(batch, query_len, width)`.

    Returns `None` if the module has no frequencies for the layer type.
    """
    takes_type = has_layer_types(module)
    if takes_type and not hasattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"):
        return None
    if not takes_type and layer_type is not None:
        return None
    device = next(module.buffers(), hidden).device
    output = call_rotary(module, hidden.to(device), position_ids.to(device), layer_type)
    phases = cosines_in(output)
    return phases[0] if phases.dim() == 4 else phases


@torch.no_grad()
def rotation_by(module: Any, width: int) -> RopeConfig | None:
    """The rotation of a module that is called with heads of this width; `None` if its frequencies are not fixed."""
    clone, places, ids = copied(module, lambda weight: weight.clone().cpu()), torch.arange(width), torch.arange(_FAR)
    packed = [*forward_parameters(type(module))][1] == "qkv"
    shapes = (1, 1, _FAR, width), (1, _FAR, 1, width), (1, _FAR, width)
    layouts = ("half", places < width // 2), ("interleaved", places % 2 == 0)
    for (layout, first), shape, axis in itertools.product(layouts, shapes, (0, 2) if packed else (0,)):
        ones = first.float().repeat(_FAR, 1).view(shape)
        # The code of others may raise anything at a call with other axes, or with more tokens than its table has.
        with suppress(Exception):
            rotated = type(module).forward(clone, *([torch.stack([ones] * 3, axis)] if packed else [ones, ones]))
            heads = (rotated.unbind(axis) if packed else rotated)[:2]
            query, key = (each.reshape(_FAR, width) for each in heads)
            angles = torch.atan2(query[:, ~first].double(), query[:, first].double())
            refuse_other_angles(module, angles, ids, None)
            if torch.equal(query, key) and angles[1].all() and not angles[0].any():
                return RopeConfig(
                    rotary_dim=width, layout=layout, inverse_frequencies=tuple(angles[1].float().tolist())
                )
    return None


def spectra_of(rotary: nn.Module, layer_type: str | None, parameters: Any) -> list[Spectrum]:
    """The frequencies of a rotary module at several lengths.

    Transformers' modules recompute their frequencies in the forward pass, from their config, their buffers and the
    largest position. A copy of the module is therefore called with a few positions.

    Args:
        rotary: the module, which is not changed.
        layer_type: the layer type, if the module has separate frequencies for several.
        parameters: its `rope_parameters`, which may contain a length too.

    Returns:
        One entry for each length. A module that does not store its original frequencies never changes them, and has a
        single entry.

    Raises:
        UnsupportedError: if its phases are not the products of positions and frequencies.
    """
    clone = copied(rotary, torch.clone)  # Running a module may change its buffers.
    device = inverse_frequencies_of(clone, layer_type).device
    spectra = []
    lengths = _lengths(rotary, layer_type, parameters)
    rows = max((size for buffer in rotary.buffers() for size in buffer.shape[:-1]), default=_FAR)
    fixed = returns_tables(rotary)
    if fixed:  # They may be extended, with other frequencies.
        rows = type(rotary).forward(clone, torch.zeros(1, 1, 1, device=device), seq_len=4 * rows)[0].shape[-2]
    for length in lengths:
        ids = torch.tensor([0, 1, (length if len(lengths) > 1 else rows) - 1], device=device)
        output = call_rotary(clone, torch.zeros(1, 3, 1, device=device), ids.unsqueeze(0), layer_type)
        stored = inverse_frequencies_of(rotary if fixed else clone, layer_type).detach()
        if stored.dtype == torch.float32:
            refuse_other_angles(rotary, angles_in(output), ids, stored)
        sizes = output.abs() if isinstance(output, Tensor) else torch.hypot(*output[:2])
        spectra.append(Spectrum(length, stored.float().cpu().clone(), float(sizes.flatten()[0])))
    return spectra


def describes(
    config: SchemeConfig, spectra: list[Spectrum], context: BuildContext, tolerance: float | None = None
) -> bool:
    """Whether a rotary scheme has these frequencies at these lengths.

    Args:
        config: the scheme.
        spectra: the frequencies of a stock module.
        context: the context of a layer that uses the module.
        tolerance: relative tolerance. The default is 1e-6 (float32), and 1e-5 above length 1, where transformers
            computes powers of a length-dependent base in float32.
    """
    try:
        query_key_map: Any = config.build(context).query_key_map
    except (ValueError, PositionEncodingError):
        return False
    for spectrum in spectra:
        frequencies = query_key_map.inverse_frequencies(torch.tensor([[spectrum.length]])).reshape(-1)
        allowed = tolerance or (1e-6 if spectrum.length == 1 else 1e-5)
        same = frequencies.shape == spectrum.frequencies.shape
        same = same and torch.allclose(frequencies, spectrum.frequencies, rtol=allowed, atol=0.0)
        if not same or abs(query_key_map.attention_scaling - spectrum.scaling) >= 1e-6:
            return False
    return True


def _lengths(rotary: nn.Module, layer_type: str | None, parameters: Any) -> list[int]:
    """1, and lengths around each length in the module or its config."""
    if _of_layer_type(rotary, "original_inv_freq", layer_type) is None:
        return [1]
    named = (
        _of_layer_type(rotary, "original_max_seq_len", layer_type),
        getattr(getattr(rotary, "config", None), "max_position_embeddings", None),
        parameters.get("original_max_position_embeddings") if isinstance(parameters, dict) else None,
    )
    switches = {length for length in named if isinstance(length, int)}
    return sorted({1}.union(*({length, length + 1, 4 * length} for length in switches)))


def _of_layer_type(rotary: nn.Module, name: str, layer_type: str | None) -> Any:
    value = getattr(rotary, f"{layer_type}_{name}", None) if layer_type else None
    return getattr(rotary, name, None) if value is None else value


def frequencies_by_axis(rotary: nn.Module, layer_type: str | None, layout: str) -> Tensor | None:
    """The frequencies of every axis of a rotary module, found by moving one token along one axis at a time.

    Args:
        rotary: the module, which is not changed.
        layer_type: the layer type, if the module has separate frequencies for several.
        layout: the pairing of the rotary function that uses the phases.

    Returns:
        `(3, pairs)` float32 in radians per position, or `None` if the module reads positions on one axis.

    Raises:
        UnsupportedError: if it reads another number of axes, or the two dimensions of a pair turn with different axes.
    """
    axes = number_of_axes(rotary, layer_type)
    if axes == 1:
        return None
    stored = inverse_frequencies_of(rotary, layer_type)
    clone, pairs = copied(rotary, torch.clone), stored.shape[-1]
    hidden = torch.zeros(1, 1, 1, device=stored.device)
    rows = []
    for axis in range(axes):
        position_ids = torch.zeros(axes, 1, 1, dtype=torch.int64, device=stored.device)
        position_ids[axis] = 1
        cos, sin = call_rotary(clone, hidden, position_ids, layer_type)
        angles = torch.atan2(sin.float(), cos.float()).reshape(-1)
        whole = angles.shape[0] == 2 * pairs
        first, second = (angles[::2], angles[1::2]) if layout == "interleaved" else (angles[:pairs], angles[pairs:])
        rows.append(first if whole else angles)
        if axes != AXES or (whole and not torch.equal(first, second)):
            raise undescribed(
                f"{type(rotary).__name__} rotates with positions on {axes} axes, in a way that no scheme of this "
                "library describes: 'mrope' has three axes, and one axis for both dimensions of a pair."
            )
    return torch.stack(rows).cpu()


#: Rows computed at a time. CTRL's table has 50,000 rows of width 1280.
_ROWS = 4096
#: Allowed error of an angle per position. Angles computed in float32 have an error of about 5e-8 times the position.
_ANGLE_ERROR = 2e-7


def vectors_of(config: SchemeConfig, width: int) -> AdditiveEncoding | None:
    """The additive part of a scheme; `None` if it cannot be built for vectors of this width."""
    try:
        return config.build(BuildContext(hidden_size=width, num_heads=1, head_dim=width)).additive
    except (ValueError, PositionEncodingError):
        return None


def reproduces(
    config: SinusoidalConfig, rows: Tensor, origin: int, *, rounding: float = 0.0, angle_error: float = 0.0
) -> bool:
    """Whether the rows from `origin` on are the encodings of positions 0, 1, 2, ...

    Args:
        config: the formula.
        rows: `(rows, width)`.
        origin: the row of position 0.
        rounding: allowed difference, in addition to 1e-4.
        angle_error: additional allowed difference, multiplied by the position.
    """
    additive = vectors_of(config, rows.shape[1])
    if additive is None:
        return False
    for start in range(origin, rows.shape[0], _ROWS):
        block = rows[start : start + _ROWS].detach().float()
        ids = torch.arange(start - origin, start - origin + block.shape[0], device=rows.device).unsqueeze(0)
        expected = additive(Positions(ids, ids[:, -1:] + 1))[0].float()
        if not ((block - expected).abs() <= 1e-4 + rounding + angle_error * ids[0].unsqueeze(-1)).all():
            return False
    return True


def sinusoids_like(rows: Tensor, origin: int = 0) -> SinusoidalConfig | None:
    """The formula that gives the rows from `origin` on; `None` if there is none, or on the meta device."""
    rounding = 0.0 if rows.dtype == torch.float32 else torch.finfo(rows.dtype).eps
    for frequencies, layout in itertools.product(("vaswani", "tensor2tensor"), LAYOUTS):
        config = SinusoidalConfig(frequencies=frequencies, layout=layout, offset=origin)
        if not rows.is_meta and reproduces(config, rows, origin, rounding=rounding):
            return config
    return None


def check_fixed_tables(tables: list[FixedTable], stack: Stack) -> None:
    """Compares every row of an architecture's tables with their formula.

    The formula comes from the declaration of the architecture. A run on a few tokens would check only the first rows.
    Tables on the meta device are not checked.
    """
    formula = SinusoidalConfig(layout="concatenated")
    for module, name in tables:
        with onload_weights(module):
            rows = getattr(module, name)
            if rows.device.type == "meta":
                continue
            if not reproduces(formula, rows, 0, rounding=torch.finfo(rows.dtype).eps, angle_error=_ANGLE_ERROR):
                raise undescribed(
                    f"`{name}` of a {type(module).__name__} in this {type(stack.module).__name__} does not match the "
                    "declaration of its architecture: its rows are not the usual sines and cosines of their positions "
                    "(base 10000), and no scheme describes it."
                )
