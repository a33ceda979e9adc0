"""Disables the native mechanisms in the attention of a stack of patches, and finds the native scheme of the stack.

Mechanisms in attention are tables and networks of displacements, flags and rotations. The native scheme describes
the position tables, these mechanisms, and the rotations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.architectures.declaration import undescribed, zero_bias_of
from hf_posenc.patching.anatomy.architectures.example_inputs import sides
from hf_posenc.patching.anatomy.discovery import build_context, native_pairing
from hf_posenc.patching.anatomy.formulas import vectors_of
from hf_posenc.patching.anatomy.native_scheme import Rotation, composed, several_tables
from hf_posenc.patching.anatomy.short_runs import run_briefly
from hf_posenc.patching.anatomy.sites import AttentionLayer, NamedModule, OwnedTable
from hf_posenc.patching.anatomy.weights import onload_weights, stored
from hf_posenc.patching.call.grid_state import in_raster
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.patching.forwards import OtherForward, forward_on_instance, names_used, unrotated, zero_output
from hf_posenc.schemes import LearnedConfig, LogCpbConfig, RopeConfig, RopeNdConfig, SinusoidalConfig, SwinConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.positions import Positions

if TYPE_CHECKING:
    from hf_posenc.patching.layouts.grid import Grid
    from hf_posenc.patching.place.transaction import Transaction


#: - "module": a module whose output is the bias (Swin, BEiT).
#: - "table": a parameter of the attention module, which looks it up itself (Donut, MaskFormer).
#: - "network": a network of the displacement (Swin v2).
#: - "flag": an attribute that turns the bias on (SAM's decomposed table, ViTDet).
#: - "rotation": a method of the attention module that rotates one tensor at a time (V-JEPA 2).
BiasKind = Literal["module", "table", "network", "flag", "rotation"]

BIAS_TABLE = "relative_position_bias_table"
_ATTRIBUTES: dict[str, BiasKind] = {
    BIAS_TABLE: "table",
    "continuous_position_bias_mlp": "network",
    "use_rel_pos": "flag",
    "use_relative_position_embeddings": "flag",
    "apply_rotary_embeddings": "rotation",
}
_NAMES: dict[BiasKind, str] = {
    "module": "bias table over displacements",
    "table": "bias table over displacements",
    "network": "bias network of displacements",
    "flag": "decomposed bias tables",
    "rotation": "rotation",
}
#: Rows of a table for pairs with a class token.
_CLASS_ROWS = 3


@dataclass
class GridBias(NamedModule):
    """One native mechanism in the attention of a grid.

    Args:
        name: the attribute that holds the mechanism; empty for the module itself.
        kind: how it is disabled.
    """

    name: str
    kind: BiasKind

    @property
    def table(self) -> Tensor | None:
        """The `(displacements, heads)` table of the bias. For a network, the weights of its inputs, the offset and
        the weights of the heads, with a row for each hidden unit. `None` for other mechanisms.
        """
        if self.kind == "network":
            layers = list(getattr(self.module, self.name).children())
            if [type(layer) for layer in layers] != [nn.Linear, nn.ReLU, nn.Linear] or layers[2].bias is not None:
                return None
            hidden, _, output = layers
            offsets = stored(hidden, "bias").unsqueeze(-1)
            return torch.cat((stored(hidden), offsets, stored(output).T), dim=1).detach()
        if self.kind in ("module", "table") and isinstance(getattr(self.module, BIAS_TABLE, None), Tensor):
            return stored(self.module, BIAS_TABLE)
        return None

    def acts_on(self, attention_path: str) -> bool:
        """Whether the bias belongs to an attention module: it is inside it, next to it, or above it."""
        owner = self.path.rpartition(".")[0] if self.kind == "module" else self.path
        return not owner or f"{attention_path}.".startswith(f"{owner}.") or self.path.startswith(f"{attention_path}.")

    def __str__(self) -> str:
        return f"{self.path}: {_NAMES[self.kind]}"

    def silence(self, journal: Any) -> None:
        """Disables the mechanism and freezes its weights."""
        module, name = self.module, self.name
        if self.kind == "module":
            journal.set_forward(module, OtherForward(module, zero_bias_of))
            journal.freeze_all(module)
        elif self.kind == "network":
            network = getattr(module, name)
            journal.set_forward(network, OtherForward(network, zero_output))
            journal.freeze(module, name)
        elif self.kind == "flag":
            journal.set(module, name, False)
            journal.freeze(module, *(name for name in module._parameters if "rel_pos" in name))
        elif self.kind == "rotation":
            journal.set(module, name, unrotated)
        else:
            site = forward_on_instance(module)
            assert isinstance(site, ScoresAttention)
            site.zero_tables = [name]
            journal.freeze(module, name)


def find_biases(modules: Iterable[tuple[str, nn.Module]]) -> list[GridBias]:
    """The native mechanisms of modules, by path."""
    biases = []
    for path, module in modules:
        if type(module).__name__.endswith("RelativePositionBias"):
            biases.append(GridBias(path, module, "", "module"))
            continue
        for name, kind in _ATTRIBUTES.items():
            # The flag of a module that has no parameters only repeats a setting.
            repeats = kind == "flag" and not any("rel_pos" in parameter_name for parameter_name in module._parameters)
            value = getattr(module, name, None)
            if value is not None and value is not False and not repeats:
                biases.append(GridBias(path, module, name, kind))
    return biases


def bias_scheme(biases: list[GridBias], stack: nn.Module) -> SchemeConfig | None:
    """The scheme of the biases of a stack; `None` without any."""
    if not biases:
        return None
    if any(bias.table is None for bias in biases):
        raise undescribed(
            f"The native mechanism in the attention of {type(stack).__name__} ({biases[0]}) is not among the "
            "schemes of this library."
        )
    schemes = {_bias_of_layer(bias, shared=len(biases) == 1) for bias in biases}
    if len(schemes) > 1:
        raise undescribed(
            f"The layers of {type(stack).__name__} have windows of different sizes, which a single scheme cannot "
            "describe.",
            "them",
        )
    return schemes.pop()


def _bias_of_layer(bias: GridBias, shared: bool) -> SchemeConfig:
    """The scheme of a bias table, or of a network that computes one.

    Raises:
        UnsupportedError: for a window of another form.
    """
    table, size = bias.table, getattr(bias.module, "window_size", None)
    window = sides(size) if isinstance(size, int | tuple | list) else None
    assert table is not None
    if bias.kind == "network" and window is not None:
        # The network reads displacements as a share of the window that it was pretrained with.
        pretrained = getattr(bias.module, "pretrained_window_size", (0, 0))
        divisor, *others = {*(pretrained if pretrained[0] > 0 else window)}
        if not others:
            return LogCpbConfig(divisor if divisor > 1 else None, table.shape[0], axes=2, shared=shared)
    rows = 0 if window is None else math.prod(2 * size - 1 for size in window)
    if window is None or bias.kind == "network" or table.shape[0] - rows not in (0, _CLASS_ROWS):
        raise UnsupportedError(
            f"{bias} has {table.shape[0]} rows, which are not the displacements in a window of {window}, so its "
            "native scheme cannot be described. Any scheme can replace it."
        )
    return SwinConfig(grid=window, class_entries=table.shape[0] > rows, shared=shared)


_INTERPOLATION = "interpolate_pos_encoding"
#: How some architectures resize their tables: a method, which cannot be called with an image size, and the options.
_RESIZED_BY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resize_positional_embeddings", {"interpolation": "bilinear", "antialias": True}),
    ("_resize_pos_embed", {"interpolation": "bilinear"}),
)
#: Functions with which a module finds the nearest row of its table for each patch.
_NEAREST = frozenset(("bucketize", "get_vision_nearest_position_ids"))
#: Attributes of modules that resize their tables with a function of `transformers.vision_utils`.
_MODE, _ALIGN_CORNERS, _PADDING = "interpolation_mode", "interpolation_align_corners", "interpolation_padding"
_ASSIGNMENTS = ("block", "split", "alternating", "interleaved")
#: Sizes of a grid that only set its number of axes, because the model passes the coordinates.
_GRID_OF_AXES = {2: (14,), 3: (14, 14)}


def native_grid_scheme(stack: Stack, grid: Grid, rotations: Mapping[str, Rotation], trial: Transaction) -> SchemeConfig:
    """The scheme of the tables, the biases and the rotations of a stack of patches."""
    if len(grid.tables) > 1:
        raise several_tables(stack, [table.full_name for table in grid.tables])
    schemes = [_table_scheme(table, grid) for table in grid.tables]
    bias = bias_scheme(grid.biases, stack.module)
    paths = ((attention, f"{stack.name}:{attention.path}") for attention in stack.attentions)
    rotated = [(attention, rotations[path]) for attention, path in paths if path in rotations]
    if bias is not None:
        schemes.append(bias)
    if rotated:
        # All layers of a vision model receive the same phases; the comparison of outputs would show if they do not.
        schemes.append(_rotation_scheme(stack, *rotated[0], trial))
    return composed(schemes)


def _table_scheme(table: OwnedTable, grid: Grid) -> SchemeConfig:
    """The scheme that has the same vectors as a table, at all resolutions.

    Raises:
        UnsupportedError: if the table has no row for each patch of a grid.
    """
    weight = table.weight.detach()
    trained = isinstance(table.value, nn.Module | nn.Parameter) and table.weight.requires_grad
    places = _places(table, grid)
    if not weight.is_meta and not trained:
        for config in _formulas(len(places)):
            if _reproduces(config, weight.float(), places, grid.suffix_tokens):
                return config
    others = weight.shape[0] - math.prod(places)
    if others < 0:
        raise UnsupportedError(
            f"The position table {table.full_name} has {weight.shape[0]} rows, fewer than the patches of a grid of "
            f"{places}, so its native scheme cannot be described. Any scheme can replace it."
        )
    learned = LearnedConfig(grid=places, num_prefix_tokens=others)
    return learned if weight.is_meta else _resized_alike(learned, table, grid)


def _places(table: OwnedTable, grid: Grid) -> tuple[int, ...]:
    """The sizes of the grid that a table is for: that of the config, or else a square."""
    rows = table.weight.shape[0] - table.prefix_rows
    if grid.native is not None and rows - math.prod(grid.native) in (0, grid.suffix_tokens):
        return grid.native
    side = math.isqrt(rows)
    if side * side != rows:
        raise UnsupportedError(
            f"The position table {table.full_name} has {rows} rows, which do not form a square grid, and the config "
            "has no image size, so its native scheme cannot be described. Any scheme can replace it."
        )
    return side, side


def _formulas(axes: int) -> list[SinusoidalConfig]:
    """The formulas of tables that are not trained: VideoMAE's counts patches, MAE's has rows and columns."""
    formulas = [SinusoidalConfig(layout=layout) for layout in ("interleaved", "concatenated")]
    for layout, columns_first in itertools.product(("concatenated", "interleaved"), (True, False)):
        formulas.append(SinusoidalConfig(layout=layout, axes=axes, columns_first=columns_first))
    return formulas


def _reproduces(config: SchemeConfig, rows: Tensor, places: tuple[int, ...], suffix_tokens: int) -> bool:
    additive = vectors_of(config, rows.shape[1])
    if additive is None:
        return False
    expected = additive(in_raster(places, rows.shape[0], suffix_tokens, rows.device))[0]
    return expected.shape == rows.shape and torch.allclose(expected.float(), rows, atol=1e-4)


def _resized_alike(learned: LearnedConfig, table: OwnedTable, grid: Grid) -> LearnedConfig:
    """The config with the options with which the architecture resizes the table, determined with its own method."""
    if hasattr(table.module, _MODE):
        if getattr(table.module, _PADDING, "border") != "border":
            raise undescribed(
                f"The position table {table.full_name} is resized with zeros around it, which no scheme of this "
                "library does."
            )
        mode, align_corners = (getattr(table.module, name) for name in (_MODE, _ALIGN_CORNERS))
        return dataclasses.replace(learned, interpolation=mode, align_corners=align_corners)
    if _NEAREST & names_used(type(table.module).forward):
        return dataclasses.replace(learned, interpolation="nearest")
    for name, options in _RESIZED_BY:
        if hasattr(table.module, name):
            return dataclasses.replace(learned, **options)
    steps = grid.step
    if not hasattr(table.module, _INTERPOLATION) or steps is None or len(learned.grid or ()) != 2:
        return learned
    assert learned.grid is not None
    larger = (learned.grid[0] + 1, learned.grid[1] + 2)
    pixels = [size * step for size, step in zip(larger, steps, strict=True)]
    rows = table.weight
    patches = rows.new_zeros(1, table.prefix_rows + math.prod(larger), rows.shape[1])
    try:
        with torch.no_grad(), onload_weights(table.module):
            expected = getattr(table.module, _INTERPOLATION)(patches, *pixels)
    except (RuntimeError, TypeError, ValueError):
        return learned
    for options in ({}, {"antialias": True}, {"interpolation": "bilinear"}, {"align_corners": True}):
        config = dataclasses.replace(learned, **options)
        additive = vectors_of(config, rows.shape[1])
        assert additive is not None
        additive.adopt(table.in_order_of_tokens(learned.num_prefix_tokens).float())
        with torch.no_grad():
            vectors = additive(in_raster(larger, expected.shape[1], grid.suffix_tokens, torch.device("cpu")))
        if vectors.shape == expected.shape and torch.allclose(vectors, expected.float().cpu(), atol=1e-4):
            return config
    return learned


def _rotation_scheme(stack: Stack, attention: AttentionLayer, rotation: Rotation, trial: Transaction) -> SchemeConfig:
    """The scheme with the phases that a layer received in a short run."""
    layout = native_pairing(stack, attention)
    assert layout is not None
    positions = _positions_of(stack, trial)
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
    raise undescribed(
        f"The phases in a layer of {type(stack.module).__name__} ({attention.path}) are those of no scheme of this "
        "library.",
        "them",
    )


def _per_pair(phases: Tensor, layout: str) -> Tensor:
    """`(tokens, pairs)`: the cosine of each pair, from phases of any shape."""
    cosines = phases.real if phases.is_complex() else phases
    cosines = cosines.reshape(-1, cosines.shape[-1]).float()
    return cosines if phases.is_complex() or layout.startswith("half") else cosines[:, ::2]


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
    parameters = getattr(config, "rope_parameters", None)
    of_parameters = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    stated = [getattr(config, "rope_theta", None), of_parameters]
    return list(dict.fromkeys([float(base) for base in stated if base] + [10000.0, 100.0]))


def _positions_of(stack: Stack, trial: Transaction) -> Positions:
    """The positions of the first layer in a short run, as the library finds them."""
    seen: list[Positions] = []
    # A scheme for the order of tokens does not depend on the number of axes.
    with trial.with_scheme(RopeConfig(), [stack]) as encoding:
        layers = encoding.stacks[stack.name].layers
        for part in {id(layer.query_key_map): layer.query_key_map for layer in layers}.values():
            part.__class__ = _recording(type(part), seen)
        run_briefly(trial.anatomy, [stack], 3)
    return dataclasses.replace(seen[0], memo={})


def _recording(kind: Any, seen: list[Positions]) -> Any:
    """A subclass of a map that records the positions that it receives."""

    class Recording(kind):
        def phases(self, positions: Positions) -> Any:
            seen.append(positions)
            return super().phases(positions)

    return Recording
