"""Placing the parts of one stack at its sites."""

from __future__ import annotations

import functools

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.additive_site import AddToHiddenStates
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.grid_sites import GridRotarySite, PictureSite, ProjectionSite, refuses_other_sizes
from hf_posenc.patching.call.grid_tables import GridTableSite
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.call.placed_forward import ZeroOutput, forward_on_instance, unrotated
from hf_posenc.patching.call.replicas import refuse_replicas
from hf_posenc.patching.call.rotary_site import RotaryModuleSite
from hf_posenc.patching.call.runtime import StackForward
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.patching.call.series_sites import ConvolutionSite, InputView, LengthSite, ParameterSite
from hf_posenc.patching.call.table_site import TableOwner, TableSite
from hf_posenc.patching.call.view import WithoutTable
from hf_posenc.patching.find.architectures import Architecture
from hf_posenc.patching.find.architectures.silencers import zero_bias_of
from hf_posenc.patching.find.forward_code import names_used
from hf_posenc.patching.find.grids import FoundBias
from hf_posenc.patching.find.sites import FoundAttention, Stack
from hf_posenc.patching.find.tables import OwnedTable
from hf_posenc.patching.place.journal import Journal
from hf_posenc.patching.place.record import SchemeRecord
from hf_posenc.patching.place.report import StackReport
from hf_posenc.patching.place.stack_encoding import TWO_DIMENSIONAL, StackEncoding, order_readers
from hf_posenc.patching.place.stack_record import StackRecord

_DESCRIPTIONS = {
    "convolution": "convolution over neighbours in place of positions",
    "sinusoids": "sinusoids of positions",
}
_NEIGHBOURS = (
    "convolutions mix neighbouring frames before or between the layers of attention, so the order of the input still "
    "shows without positions"
)


def install_stack(stack: Stack, encoding: StackEncoding, record: SchemeRecord) -> StackReport:
    """Disables the native mechanisms of a stack and installs the parts of the scheme in their place.

    Args:
        stack: the stack.
        encoding: the parts of the scheme.
        record: records every change.

    Returns:
        What was replaced and placed.

    Raises:
        UnsupportedError: if an additive scheme cannot be placed.
    """
    architecture, journal = stack.architecture, record.journal
    encoding.runtime.slots.measure(stack.module)
    report = StackReport(stack.name, stack.part, stack.layers(), kept=[f"{path}: {why}" for path, why in stack.skipped])
    report.kept.extend(architecture.kept)
    runtime = encoding.runtime
    runtime.watch = record.stacks[stack.name] = StackRecord(stack, encoding, journal, record.stacks.get(stack.name))
    if next(encoding.parameters(), None) is not None:
        runtime.replicas = encoding
    journal.wrap_forward(stack.module, lambda inner: StackForward(stack.module, runtime, inner))
    journal.set(stack.module, "_replicate_for_data_parallel", refuse_replicas)
    if architecture.silence is not None:
        architecture.silence(stack, journal)
    for module, name in architecture.fixed_tables(stack) if architecture.fixed_tables else ():
        if module is stack.module:
            runtime.tables = WithoutTable(module, name)
    if stack.mechanism:
        report.replaced.append(f"{stack.name}: {stack.mechanism}")
    for attention, layer in zip(stack.attentions, encoding.layers, strict=True):
        _install_attention(attention, layer, encoding, architecture, journal, report)
    # Whether every layer passes its phases to a replaced function, and no other module may read them.
    replaced = (attention.rotary_functions or architecture.rotary_method for attention in stack.attentions)
    unused = not stack.skipped and all(replaced)
    for module in (rotary.module for rotary in stack.rotaries):
        on_grid = stack.grid is not None and unused
        site = GridRotarySite(module, runtime) if on_grid else RotaryModuleSite(module, runtime, unused=unused)
        journal.set_forward(module, site)
    for table in stack.tables:
        journal.set_forward(table.module, TableSite(table.module, runtime, encoding.additive))
        owner = stack.module.get_submodule(table.path.rpartition(".")[0])
        # Some owners read the weight of their table.
        if owner is not stack.module and {"weight", "shape"} <= names_used(type(owner).forward):
            journal.set_forward(owner, TableOwner(owner, table.path.rpartition(".")[2]))
        journal.freeze_all(table.module)
        report.replaced.append(f"{table.path}: position table ({type(table.module).__name__})")
        if encoding.additive is not None:
            report.placed.append(f"additive: {table.path}")
    if stack.grid is not None:
        _install_grid(stack, encoding, journal, report)
    if stack.series is not None:
        _install_series(stack, encoding, journal, report)
    if encoding.additive is not None and not _has_place_for_vectors(stack):
        weighted = (one for one in (stack.first_layer or nn.Identity()).modules() if one._parameters)
        # A convolution reads a map of channels.
        if stack.first_layer is None or isinstance(next(weighted, None), nn.Conv2d):
            raise UnsupportedError(
                f"{type(stack.module).__name__} has neither a position table nor a list of layers that read vectors of "
                "tokens, so positions cannot be added to its embeddings. Use a scheme that acts inside attention."
            )
        journal.add_forward_pre_hook(stack.first_layer, AddToHiddenStates(runtime, encoding.additive))
        record.stacks[stack.name].first_layer = stack.first_layer
        report.placed.append(f"additive: input of {type(stack.first_layer).__name__} 0")
    return report


def _silence_relative(attention: FoundAttention, journal: Journal) -> None:
    relative = attention.relative
    assert relative is not None
    if relative.projection is not None:
        journal.set_forward(relative.projection, ZeroOutput(relative.projection))
    if relative.method is not None:
        journal.replace(attention.module, relative.method, unrotated)
    for name in relative.names:
        if name in attention.module._parameters:
            journal.freeze(attention.module, name)
        else:
            journal.freeze_all(getattr(attention.module, name))


def _has_place_for_vectors(stack: Stack) -> bool:
    """Whether the architecture adds vectors of its own to its embeddings."""
    of_grid = stack.grid is not None and stack.grid.tables
    of_series = stack.series is not None and stack.series.has_sites
    return bool(stack.tables or of_grid or of_series)


def _install_attention(
    attention: FoundAttention,
    layer: LayerEncoding,
    encoding: StackEncoding,
    architecture: Architecture,
    journal: Journal,
    report: StackReport,
) -> None:
    module, runtime = attention.module, encoding.runtime
    if attention.uses_interface:
        known = architecture.mechanism is not None or attention.relative is not None
        bias = "kept" if architecture.keeps_bias else "dropped" if known else "unknown"
        site: AttentionSite = InterfaceAttention(module, runtime, layer, architecture.operand_factors, bias)
    else:
        site = scores = ScoresAttention(module, runtime, layer, architecture.bias_arguments)
        if architecture.rotary_method:
            journal.replace(module, architecture.rotary_method, scores.rotate_pair)
            report.replaced.append(f"{attention.path}: {architecture.rotary_method}")
    site.window = attention.window
    journal.set_forward(module, site)
    report.replaced.extend(f"{attention.path}: {name}" for name in attention.rotary_functions)
    if attention.relative is not None:
        _silence_relative(attention, journal)
    for name in ("query_key_map", "logit_bias", "logit_scale"):
        if getattr(layer, name) is not None:
            report.placed.append(f"{name}: {attention.path}")


def _install_grid(stack: Stack, encoding: StackEncoding, journal: Journal, report: StackReport) -> None:
    """Records the grid of every call, and puts the vectors of the scheme in place of the tables over the grid."""
    grid, runtime = stack.grid, encoding.runtime
    assert grid is not None
    if grid.projection is not None:
        journal.set_forward(grid.projection, ProjectionSite(grid.projection, runtime))
        owners = {id(stack.module), *(id(table.module) for table in grid.tables)}
        for module in stack.module.modules():
            inside = any(child is grid.projection for child in module.children())
            if inside and id(module) not in owners and refuses_other_sizes(module):
                journal.set_forward(module, PictureSite(module, runtime))
    for first in grid.sites():
        own = [table for table in grid.tables if table.module is first.module]
        alone = len(grid.tables) == 1
        site = GridTableSite(first.module, own, grid.tables[0], runtime, encoding.additive, alone=alone)
        if first.module is stack.module:
            runtime.tables = site
        else:
            journal.set_forward(first.module, site)
        for table in own:
            _freeze_table(table, journal)
            report.replaced.append(f"{table.full_name}: position table ({type(table.module).__name__})")
    in_order = order_readers(encoding.acting_parts())
    if in_order:
        report.positions = f"patches are numbered row by row for {' and '.join(in_order)}. {TWO_DIMENSIONAL}"
    elif next(encoding.acting_parts(), None) is not None:
        report.positions = "rows and columns of patches"
    modules = () if stack.first_layer is None else stack.first_layer.modules()
    if any(isinstance(module, nn.Conv2d) and module.kernel_size[-1] > 1 for module in modules):
        report.kept.append("convolutions between its layers read neighbouring patches")
    for bias in grid.biases:
        _silence_bias(bias, journal)
        report.replaced.append(str(bias))
    if encoding.additive is not None and grid.tables:
        if len(grid.tables) > 1 and isinstance(grid.projection, nn.Conv3d):
            names = " and ".join(table.full_name for table in grid.tables)
            raise UnsupportedError(
                f"{type(stack.module).__name__} numbers the patches of a frame and the frames in separate tables "
                f"({names}), so the vectors of a scheme have no place in it. Use a scheme that acts inside attention."
            )
        report.placed.append(f"additive: {grid.tables[0].full_name}")


def _silence_bias(bias: FoundBias, journal: Journal) -> None:
    module, name = bias.module, bias.name
    if bias.kind == "module":
        journal.set(module, "forward", functools.partial(zero_bias_of, module))
        journal.freeze_all(module)
    elif bias.kind == "network":
        network = getattr(module, name)
        journal.set_forward(network, ZeroOutput(network))
        journal.freeze_all(network)
    elif bias.kind == "flag":
        journal.set(module, name, False)
        for own in module._parameters:
            if "rel_pos" in own:
                journal.freeze(module, own)
    elif bias.kind == "rotation":
        journal.set(module, name, unrotated)
    else:
        site = forward_on_instance(module)
        assert isinstance(site, ScoresAttention)
        site.zero_tables = [name]
        journal.freeze(module, name)


def _freeze_table(table: OwnedTable, journal: Journal) -> None:
    if isinstance(table.value, nn.Module):
        journal.freeze_all(table.value)
    elif table.name in table.module._parameters:
        journal.freeze(table.module, table.name)


def _install_series(stack: Stack, encoding: StackEncoding, journal: Journal, report: StackReport) -> None:
    """Puts the vectors of the scheme in place of those of the architecture. The first module gets them."""
    series, runtime = stack.series, encoding.runtime
    assert series is not None
    additive = None if stack.tables else encoding.additive
    if series.fixed_input is not None:
        runtime.input_view = InputView(stack.module, series.fixed_input, runtime)
    for found in series.vectors:
        site = ConvolutionSite if found.kind == "convolution" else LengthSite
        journal.set_forward(found.module, site(found, runtime, additive))
        journal.freeze_all(found.module)
        report.replaced.append(f"{found.path}: {_DESCRIPTIONS[found.kind]} ({type(found.module).__name__})")
        if additive is not None:
            report.placed.append(f"additive: {found.path}")
        additive = None
    for table in series.parameters:
        journal.set_forward(table.module, ParameterSite(table, runtime, additive))
        _freeze_table(table, journal)
        report.replaced.append(f"{table.full_name}: position table ({type(table.module).__name__})")
        if additive is not None:
            report.placed.append(f"additive: {table.full_name}")
        additive = None
    if series.mixes_neighbours:
        report.kept.append(_NEIGHBOURS)
