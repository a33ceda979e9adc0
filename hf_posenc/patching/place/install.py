"""Placing the parts of one stack at its sites."""

from __future__ import annotations

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.additive_site import AddToHiddenStates
from hf_posenc.patching.call.grid.rotary_site import GridRotarySite
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.call.native_stand_ins import UnchangedInput, ZeroOutput
from hf_posenc.patching.call.placed_forward import PlacedForward
from hf_posenc.patching.call.replicas import RefuseReplicas, ReplicasCheck
from hf_posenc.patching.call.rotary_site import RotaryMethodSite, RotaryModuleSite
from hf_posenc.patching.call.runtime import StackForward, StackRuntime
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.patching.call.table_site import TableOwner, TableSite
from hf_posenc.patching.find.architectures import Architecture
from hf_posenc.patching.find.sites import FoundAttention, Stack
from hf_posenc.patching.place.install_grid import install_grid
from hf_posenc.patching.place.install_series import install_series
from hf_posenc.patching.place.journal import Journal
from hf_posenc.patching.place.record import SchemeRecord
from hf_posenc.patching.place.report import StackReport
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.patching.place.stack_record import StackRecord


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
    report = StackReport(stack.name, stack.part, stack.layers(), kept=[f"{path}: {why}" for path, why in stack.skipped])
    report.kept.extend(architecture.kept)
    runtime = encoding.runtime
    runtime.watch = record.stacks[stack.name] = StackRecord(stack, encoding, journal, record.stacks.get(stack.name))
    if next(encoding.parameters(), None) is not None:
        runtime.replicas = ReplicasCheck(encoding)
    journal.wrap_forward(stack.module, lambda inner: StackForward(stack.module, runtime, inner))
    journal.set(stack.module, "_replicate_for_data_parallel", RefuseReplicas())
    if architecture.silence is not None:
        architecture.silence(stack, journal)
    if stack.mechanism:
        report.replaced.append(f"{stack.name}: {stack.mechanism}")
    for attention, layer in zip(stack.attentions, encoding.layers, strict=True):
        _install_attention(attention, layer, encoding, architecture, journal, report)
    unused = _phases_are_unused(stack, architecture)
    for rotary in stack.rotaries:
        journal.set_forward(rotary.module, _rotary_site(stack, rotary.module, runtime, unused))
    for table in stack.tables:
        journal.set_forward(table.module, TableSite(table.module, runtime, encoding.additive))
        owner = stack.module.get_submodule(table.path.rpartition(".")[0])
        if owner is not stack.module and TableOwner.reads_rows(owner):
            journal.set_forward(owner, TableOwner(owner, table.path.rpartition(".")[2]))
        for name in table.module._parameters:
            journal.freeze(table.module, name)
        report.replaced.append(f"{table.path}: position table ({type(table.module).__name__})")
        if encoding.additive is not None:
            report.placed.append(f"additive: {table.path}")
    if stack.grid is not None:
        install_grid(stack, encoding, journal, report)
    if stack.series is not None:
        install_series(stack, encoding, journal, report)
    if encoding.additive is not None and not _has_place_for_vectors(stack):
        if stack.first_layer is None:
            raise UnsupportedError(
                f"{type(stack.module).__name__} has neither a position table nor a list of layers, so positions cannot "
                "be added to its embeddings."
            )
        journal.add_forward_pre_hook(stack.first_layer, AddToHiddenStates(runtime, encoding.additive))
        record.stacks[stack.name].first_layer = stack.first_layer
        report.placed.append(f"additive: input of {type(stack.first_layer).__name__} 0")
    return report


def _rotary_site(stack: Stack, rotary: nn.Module, runtime: StackRuntime, unused: bool) -> PlacedForward:
    if stack.grid is not None and unused:
        return GridRotarySite(rotary, runtime)
    return RotaryModuleSite(rotary, runtime, unused=unused)


def _silence_relative(attention: FoundAttention, journal: Journal) -> None:
    relative = attention.relative
    assert relative is not None
    if relative.projection is not None:
        journal.set_forward(relative.projection, ZeroOutput(relative.projection))
    if relative.method is not None:
        journal.replace(attention.module, relative.method, UnchangedInput())
    for name in relative.names:
        if name in attention.module._parameters:
            journal.freeze(attention.module, name)
        else:
            for own in getattr(attention.module, name)._parameters:
                journal.freeze(getattr(attention.module, name), own)


def _has_place_for_vectors(stack: Stack) -> bool:
    """Whether the architecture adds vectors of its own to its embeddings."""
    of_grid = stack.grid is not None and stack.grid.tables
    of_series = stack.series is not None and stack.series.has_sites
    return bool(stack.tables or of_grid or of_series)


def _phases_are_unused(stack: Stack, architecture: Architecture) -> bool:
    """Whether every layer passes its phases to a replaced function, and no other module may read them."""
    return not stack.skipped and all(
        attention.rotary_functions or architecture.rotary_method for attention in stack.attentions
    )


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
        found = InterfaceAttention(
            module, runtime, layer, drop_native_bias=True, operand_factors=architecture.operand_factors
        )
        found.window = attention.window
        journal.set_forward(module, found)
    else:
        site = ScoresAttention(module, runtime, layer, architecture.bias_arguments)
        site.window = attention.window
        journal.set_forward(module, site)
        if architecture.rotary_method:
            journal.replace(module, architecture.rotary_method, RotaryMethodSite(site))
            report.replaced.append(f"{attention.path}: {architecture.rotary_method}")
    report.replaced.extend(f"{attention.path}: {name}" for name in attention.rotary_functions)
    if attention.relative is not None:
        _silence_relative(attention, journal)
    for name in ("query_key_map", "logit_bias", "logit_scale"):
        if getattr(layer, name) is not None:
            report.placed.append(f"{name}: {attention.path}")
