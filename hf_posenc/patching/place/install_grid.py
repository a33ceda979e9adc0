"""Placing the parts of a stack whose input is pixels at its patch projection and its tables."""

from __future__ import annotations

from torch import nn

from hf_posenc.patching.call.grid.projection_site import ProjectionSite
from hf_posenc.patching.call.grid.silenced import Unrotated, ZeroBiasModule, ZeroNetwork
from hf_posenc.patching.call.grid.table_site import GridTableSite
from hf_posenc.patching.call.placed_forward import forward_on_instance
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.patching.find.grids.biases import FoundBias
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.place.journal import Journal
from hf_posenc.patching.place.raster_order import TWO_DIMENSIONAL, order_readers
from hf_posenc.patching.place.report import StackReport
from hf_posenc.patching.place.stack_encoding import StackEncoding


def install_grid(stack: Stack, encoding: StackEncoding, journal: Journal, report: StackReport) -> None:
    """Records the grid of every call, and puts the vectors of the scheme in place of the tables over the grid."""
    grid, runtime = stack.grid, encoding.runtime
    assert grid is not None
    if grid.projection is not None:
        journal.set_forward(grid.projection, ProjectionSite(grid.projection, runtime))
    for first in grid.sites():
        own = [table for table in grid.tables if table.module is first.module]
        site = GridTableSite(first.module, own, grid.tables[0], runtime, encoding.additive)
        if first.module is stack.module:
            runtime.tables = site
        else:
            journal.set_forward(first.module, site)
        for table in own:
            _freeze(table.module, table.name, journal)
            report.replaced.append(f"{table.full_name}: position table ({type(table.module).__name__})")
    in_order = order_readers(encoding.acting_parts())
    if in_order:
        report.positions = f"patches are numbered row by row for {' and '.join(in_order)}. {TWO_DIMENSIONAL}"
    elif next(encoding.acting_parts(), None) is not None:
        report.positions = "rows and columns of patches"
    if _mixes_patches(stack):
        report.kept.append("convolutions between its layers read neighbouring patches")
    for bias in grid.biases:
        _silence(bias, journal)
        report.replaced.append(str(bias))
    if encoding.additive is not None and grid.tables:
        report.placed.append(f"additive: {grid.tables[0].full_name}")


def _mixes_patches(stack: Stack) -> bool:
    """Whether a convolution of the first layer reads several patches."""
    modules = () if stack.first_layer is None else stack.first_layer.modules()
    return any(isinstance(module, nn.Conv2d) and module.kernel_size[-1] > 1 for module in modules)


def _silence(bias: FoundBias, journal: Journal) -> None:
    module, name = bias.module, bias.name
    if bias.kind == "module":
        journal.set(module, "forward", ZeroBiasModule(module))
        _freeze_all(module, journal)
    elif bias.kind == "network":
        network = getattr(module, name)
        journal.set(network, "forward", ZeroNetwork(network))
        _freeze_all(network, journal)
    elif bias.kind == "flag":
        journal.set(module, name, False)
        for own in module._parameters:
            if "rel_pos" in own:
                journal.freeze(module, own)
    elif bias.kind == "rotation":
        journal.set(module, name, Unrotated())
    else:
        site = forward_on_instance(module)
        assert isinstance(site, ScoresAttention)
        site.zero_tables = [name]
        journal.freeze(module, name)


def _freeze_all(module: nn.Module, journal: Journal) -> None:
    for one in module.modules():
        for name in one._parameters:
            journal.freeze(one, name)


def _freeze(module: object, name: str, journal: Journal) -> None:
    value = getattr(module, name)
    parameters = getattr(value, "_parameters", None)
    if parameters is not None:
        for own in parameters:
            journal.freeze(value, own)
    elif name in getattr(module, "_parameters"):  # noqa: B009
        journal.freeze(module, name)  # type: ignore[arg-type]
