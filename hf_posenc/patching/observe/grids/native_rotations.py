"""The native scheme of rotations on a grid, determined by comparing phases."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.find.layer_context import build_context, native_pairing
from hf_posenc.patching.find.sites import FoundAttention, Stack
from hf_posenc.patching.observe.rotations import Rotation
from hf_posenc.patching.observe.short_runs import run_briefly
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.schemes import RopeConfig, RopeNdConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.positions import Positions

_ASSIGNMENTS = ("block", "split", "alternating", "interleaved")
#: Sizes of a grid that only set its number of axes, because the model passes the coordinates.
_GRID_OF_AXES = {2: (14,), 3: (14, 14)}


def grid_rotation_scheme(
    transaction: Transaction, stack: Stack, attention: FoundAttention, rotation: Rotation
) -> SchemeConfig:
    """The scheme with the phases that a layer received in a short run.

    Raises:
        UnsupportedError: if no scheme has these phases.
    """
    layout = native_pairing(stack, attention)
    assert layout is not None
    positions = _positions_of(transaction, stack)
    context = build_context(stack, attention)
    shown = _per_pair(rotation.phases, layout)
    if positions.coordinates is not None:
        for config in _candidates(stack, positions.coordinates.shape[0], layout):
            try:
                query_key_map: Any = config.build(context).query_key_map
            except (ValueError, PositionEncodingError):
                continue
            if _agrees(query_key_map.angles(positions)[0], positions, shown):
                return config
    raise UnsupportedError(
        f"The phases in a layer of {type(stack.module).__name__} ({attention.path}) are those of no scheme of this "
        "library. Any scheme can replace them, and unpatch_model restores them."
    )


def _per_pair(phases: Tensor, layout: str) -> Tensor:
    """`(tokens, pairs)`: the cosine of each pair, from phases of any shape."""
    cosines = phases.real if phases.is_complex() else phases
    cosines = cosines.reshape(-1, cosines.shape[-1]).float()
    if phases.is_complex() or layout.startswith("half"):
        return cosines
    return cosines[:, ::2]


def _agrees(angles: Tensor, positions: Positions, shown: Tensor) -> bool:
    """Whether angles `(length, pairs)` have the cosines that a layer received, for tokens with a place or for all."""
    if positions.placed is not None and shown.shape[0] != angles.shape[0]:
        angles = angles[positions.placed[0]]
    cosines = angles.cos()
    if cosines.shape[0] != shown.shape[0] or cosines.shape[1] > shown.shape[1]:
        return False
    # Phases as wide as a head hold each cosine twice.
    return torch.allclose(cosines, shown[:, : cosines.shape[1]], atol=1e-4)


def _candidates(stack: Stack, axes: int, layout: str) -> Iterator[RopeNdConfig]:
    bases = _bases(stack.config)
    for theta, assignment, columns_first, (coordinates, origin) in itertools.product(
        bases, _ASSIGNMENTS, (False, True), (("index", 0), ("index", 1), ("normalized", 0))
    ):
        yield RopeNdConfig(
            theta=theta,
            grid=_GRID_OF_AXES[axes],
            assignment=assignment,
            layout=layout,
            coordinates=coordinates,
            origin=origin,
            columns_first=columns_first,
        )


def _bases(config: Any) -> list[float]:
    parameters = getattr(config, "rope_parameters", None) or {}
    stated = [
        getattr(config, "rope_theta", None),
        parameters.get("rope_theta") if isinstance(parameters, dict) else None,
    ]
    return list(dict.fromkeys([float(one) for one in stated if one] + [10000.0, 100.0]))


def _positions_of(transaction: Transaction, stack: Stack) -> Positions:
    """The positions of the first layer in a short run, as the library finds them."""
    # A scheme for the order of tokens does not depend on the number of axes.
    encoding = transaction.plan_alone(RopeConfig(), [stack])
    seen: list[Positions] = []
    for part in _maps_of(encoding, stack):
        part.__dict__["phases"] = _Recorder(part, seen)
    with transaction.installed(encoding):
        run_briefly(transaction, [stack], 3)
    return dataclasses.replace(seen[0], memo={})


class _Recorder:
    """Records the positions that a map receives."""

    def __init__(self, part: Any, seen: list[Positions]) -> None:
        self.part = part
        self.seen = seen

    def __call__(self, positions: Positions) -> Any:
        self.seen.append(positions)
        return type(self.part).phases(self.part, positions)


def _maps_of(encoding: PositionEncoding, stack: Stack) -> list[Any]:
    layers = encoding.stacks[stack.name].layers
    return list({id(layer.query_key_map): layer.query_key_map for layer in layers}.values())
