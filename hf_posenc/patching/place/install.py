"""Placing the parts of one stack at its sites, and the report of what was replaced and placed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.architectures import Architecture
from hf_posenc.patching.anatomy.sites import AttentionLayer, Stack
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.call.module_sites import AddToHiddenStates
from hf_posenc.patching.call.parallel import refuse_replicas
from hf_posenc.patching.call.placed_forward import ZeroOutput, unrotated
from hf_posenc.patching.call.runtime import StackForward
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.patching.call.view import WithoutTable
from hf_posenc.patching.place.journal import Journal
from hf_posenc.patching.place.record import SchemeRecord
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.patching.place.stack_record import StackRecord


@dataclass
class StackReport:
    """The changes in one stack.

    Args:
        name: "encoder", "decoder", "model", or the path of the stack in a composite model.
        part: the part of the model that the stack belongs to, such as "text".
        attention_layers: indices of the layers whose attention uses the scheme.
        replaced: native mechanisms that are disabled, as "module path: mechanism".
        placed: parts of the scheme, as "part: module path".
        kept: position-dependent behaviour of the architecture that remains active.
        adopted: parts that took over native weights.
        positions: what the scheme reads as the positions of patches; empty for other tokens.
    """

    name: str
    part: str
    attention_layers: list[int]
    replaced: list[str] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    adopted: list[str] = field(default_factory=list)
    positions: str = ""


@dataclass
class PatchReport:
    """The changes made by `patch_model`.

    Args:
        scheme: name of the scheme in force.
        model_class: class of the patched model.
        new_parameters: number of trainable scalars of the scheme.
        stacks: one entry per stack of attention layers.
        untouched: the parts of the model that keep their native positions.
        context: a description of the context length, the native length, and the longest sequence of the scheme.
    """

    scheme: str
    model_class: str
    new_parameters: int
    stacks: list[StackReport]
    untouched: list[str] = field(default_factory=list)
    context: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model_class} with {self.scheme!r}: {self.new_parameters} new parameters"]
        if self.context:
            lines.append(f"  context: {self.context}")
        if self.untouched:
            patched = " and ".join(dict.fromkeys(stack.part for stack in self.stacks))
            lines.append(f"  part: {patched}; {', '.join(self.untouched)} unchanged (choose with the option part)")
        for stack in self.stacks:
            lines.append(f"  {stack.name}: {len(stack.attention_layers)} attention layers")
            if stack.positions:
                lines.append(f"    positions: {stack.positions}")
            for title in ("replaced", "placed", "kept", "adopted"):
                entries = getattr(stack, title)
                if len(entries) > 6:  # Most entries repeat the same mechanism.
                    entries = [*entries[:2], f"... {len(entries) - 3} more ...", entries[-1]]
                lines.extend(f"    {title}: {entry}" for entry in entries)
        return "\n".join(lines)


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
            runtime.viewed = WithoutTable(module, name)
    if stack.mechanism:
        report.replaced.append(f"{stack.name}: {stack.mechanism}")
    for attention, layer in zip(stack.attentions, encoding.layers, strict=True):
        _install_attention(attention, layer, encoding, architecture, journal, report)
    # Whether every layer passes its phases to a replaced function, and no other module may read them.
    replaced = (attention.rotary_functions or architecture.rotary_method for attention in stack.attentions)
    unused = not stack.skipped and all(replaced)
    for module in (rotary.module for rotary in stack.rotaries):
        journal.set_forward(module, stack.layout.rotary_site(module, runtime, unused=unused))
    stack.layout.install(stack, encoding, journal, report)
    if encoding.additive is not None and not stack.layout.vector_sites(stack):
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


def _silence_relative(attention: AttentionLayer, journal: Journal) -> None:
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


def _install_attention(
    attention: AttentionLayer,
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
