"""Placing the parts of a scheme in a model: at the sites of each stack, and in each process of several.

Under tensor parallelism every process holds all parameters of a scheme, so that checkpoints are the same as those of a
single process. Only the values computed from them are split, by the parts in `patching/call/parallel.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.architectures import Architecture
from hf_posenc.patching.anatomy.sites import AttentionLayer
from hf_posenc.patching.anatomy.weights import has_engine
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.cross_attention import CrossAttention
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.patching.call.module_sites import AddToHiddenStates, RotaryModuleSite
from hf_posenc.patching.call.parallel import HeadShard, refuse_replicas, split_part
from hf_posenc.patching.call.runtime import StackForward
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.patching.forwards import WithoutTable, forward_on_instance
from hf_posenc.patching.place.encoding import LayerEncoding, PositionEncoding, StackEncoding
from hf_posenc.patching.place.record import Journal, SchemeRecord
from hf_posenc.patching.place.stack_record import KINDS_IN_LAYERS, StackRecord
from hf_posenc.schemes.parts import Part, mark_parts_of_one_layer
from hf_posenc.schemes.refusals import ADAPTION_PROMPTS, SHARDED_WEIGHTS


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
        scheme: the scheme in force, with the options that are not the defaults.
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
                lines.extend(f"    {title}: {entry}" for entry in _by_layers(getattr(stack, title)))
        return "\n".join(lines)


def _by_layers(entries: list[str]) -> list[str]:
    """Writes entries that only differ in the number of their layer as one, such as `layers.0-7,9.self_attn`."""
    for path in (".*?", ".*"):  # the first number of a path, then the last one, such as that of a block in a stage
        spans: dict[tuple[str, str], list[list[int]]] = {}
        for entry in entries:
            match = re.fullmatch(rf"({path}\.)(\d+)((?:\.|:).*|)", entry, re.DOTALL)
            before, number, after = match.groups() if match else (entry, "", "")
            known = spans.setdefault((before, after), [])
            if number and known and known[-1][1] + 1 == int(number):
                known[-1][1] += 1
            elif number:
                known.append([int(number)] * 2)
        entries = [
            before + ",".join(f"{first}-{last}" if last > first else str(first) for first, last in known) + after
            for (before, after), known in spans.items()
        ]
    return entries


def install_stack(stack: Stack, encoding: StackEncoding, record: SchemeRecord) -> StackReport:
    """Replaces the native mechanisms of a stack by a scheme; returns what was replaced and placed."""
    architecture, journal = stack.architecture, record.journal
    encoding.runtime.slots.measure(stack.module)
    skipped = (f"{path}: {why}" for path, why in stack.skipped if path not in encoding.cross)
    report = StackReport(stack.name, stack.part, stack.layers(), kept=[*skipped, *architecture.kept])
    runtime = encoding.runtime
    runtime.watch = record.stacks[stack.name] = StackRecord(stack, encoding, journal, record.stacks.get(stack.name))
    mark_parts_of_one_layer(layer.parts for layer in (*encoding.layers, *encoding.cross.values()))
    if next(encoding.parameters(), None) is not None:
        runtime.replicas = encoding
    before = forward_on_instance(stack.module)
    journal.place_forward(stack.module, before, StackForward(stack.module, runtime, inner=before))
    journal.set(stack.module, "_replicate_for_data_parallel", refuse_replicas)
    if architecture.silence is not None:
        architecture.silence(stack, journal)
    for module, name in architecture.fixed_tables(stack) if architecture.fixed_tables else ():
        if module is stack.module:
            runtime.viewed = WithoutTable(module, name)
    if stack.mechanism:
        report.replaced.append(f"{stack.name}: {stack.mechanism}")
    for attention, layer in zip(stack.attentions, encoding.layers, strict=True):
        if attention.sparse:
            report.kept.append(f"{attention.path}: sparse attention, in which no scheme acts")
            continue
        _install_attention(attention, layer, encoding, architecture, journal, report)
    for path, layer in encoding.cross.items():
        module = stack.module.get_submodule(path)
        journal.set_forward(module, CrossAttention(module, runtime, layer))
        report.placed.extend(_placed(layer, path))
    # Whether every layer passes its phases to a replaced function, and no other module may read them.
    replaced = (attention.rotary_functions or architecture.rotary_method for attention in stack.attentions)
    unused = not stack.skipped and all(replaced)
    for module in (rotary.module for rotary in stack.rotaries):
        journal.set_forward(module, RotaryModuleSite(module, runtime, unused=unused))
    stack.layout.install(stack, encoding, journal, report)
    if encoding.additive is not None and not stack.layout.vector_sites(stack):
        modules = (stack.first_layer or nn.Identity()).modules()
        within = {id(module) for module in stack.attentions[0].module.modules()}
        weighted = (module for module in modules if module._parameters and id(module) not in within)
        # A convolution reads a map of channels. Attention may make one of vectors for its own convolutions (CvT).
        if stack.first_layer is None or isinstance(next(weighted, None), nn.Conv2d):
            raise UnsupportedError(
                f"{type(stack.module).__name__} has neither a position table nor a list of layers that read vectors of "
                "tokens, so positions cannot be added to its embeddings. Use a scheme that acts inside attention."
            )
        journal.add_forward_pre_hook(stack.first_layer, AddToHiddenStates(runtime, encoding.additive))
        record.stacks[stack.name].first_layer = stack.first_layer
        report.placed.append(f"additive: input of {type(stack.first_layer).__name__} 0")
    return report


class UnfilledTable(NamedTuple):
    """A scheme's table: its random rows, all its rows, the rows of the native table, and whether it took that over."""

    random: int
    rows: int
    native_rows: int
    taken: bool


def adopt_native(encoding: StackEncoding, stack: Stack) -> list[str]:
    """Copies native weights into parts that can use them; returns what was adopted."""
    adopted = []
    vectors = None if encoding.additive is None else stack.layout.native_vectors(stack, encoding.additive)
    if encoding.additive is not None and vectors is not None:
        table, path = vectors
        if table.device.type != "meta" and _takes_over(encoding, encoding.additive, table):
            adopted.append(f"additive: {path}")
    for index, (attention, layer) in enumerate(zip(stack.attentions, encoding.layers, strict=True)):
        native = stack.layout.native_bias(stack, attention)
        if layer.logit_bias is None or native is None or native.device.type == "meta":
            continue
        # The other layers copy the same numbers into a part that they share.
        first = all(layer.logit_bias is not other.logit_bias for other in encoding.layers[:index])
        if _takes_over(encoding, layer.logit_bias, native) if first else layer.logit_bias.adopt(native):
            adopted.append(f"logit_bias: {attention.path}")
    return adopted


def _takes_over(encoding: StackEncoding, part: Part, native: Tensor) -> bool:
    """Whether a part copies a native table; notes the rows that keep their random numbers."""
    before = {name: weight.detach().clone() for name, weight in part.named_parameters()}
    taken = bool(part.adopt(native))
    for name, weight in part.named_parameters():
        rows = (weight.detach() == before[name]).all(-1) if weight.ndim else weight.new_zeros(())
        # Tables of another kind, such as that of DeBERTa for T5's buckets, are not expected to fit.
        same_kind = weight.shape[-1:] == native.shape[-1:] and native.ndim - weight.ndim in (0, 1)
        unfilled = UnfilledTable(int(rows.sum()), rows.numel(), math.prod(native.shape[:-1]), taken)
        if same_kind and unfilled.random and type(part).adopt is not Part.adopt and unfilled not in encoding.unfilled:
            encoding.unfilled.append(unfilled)
    return taken


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
        attention.relative.silence(module, journal)
    report.placed.extend(_placed(layer, attention.path))


def _placed(layer: LayerEncoding, path: str) -> list[str]:
    return [f"{kind}: {path}" for kind in KINDS_IN_LAYERS if getattr(layer, kind) is not None]


def include_schemes(base: nn.Module, schemes: Mapping[int, nn.Module], journal: Journal) -> None:
    """Gives every module between a base model and its stacks a method `parameters` that includes their schemes.

    The base model holds the scheme of all its parts. Code that freezes a part, clips its gradients or gives it to an
    optimizer asks the part for its parameters, and means those of its scheme too.

    Args:
        base: the module that holds the schemes.
        schemes: the scheme of each stack that has parameters, by the identity of the stack.
        journal: records the changes.
    """
    for module in base.modules():
        inside = [schemes[id(inner)] for inner in module.modules() if id(inner) in schemes]
        if inside and module is not base:
            journal.set(module, "parameters", functools.partial(_with_schemes, module, inside))


def _with_schemes(module: nn.Module, schemes: list[nn.Module], recurse: bool = True) -> Iterator[Parameter]:
    """The parameters of a part of a model, then those of its schemes."""
    yield from type(module).parameters(module, recurse)
    for scheme in schemes if recurse else ():
        yield from scheme.parameters()


#: Styles of a tensor-parallel plan that give every process all heads of a projection.
_GATHERED = ("colwise_gather_output", "colwise_rep")
#: The style of a tensor-parallel plan that gives a module only some of the tokens.
_SEQUENCE = "sequence_parallel"


def split_heads(encoding: PositionEncoding, model: nn.Module) -> None:
    """Restricts the patched attention layers of a model to the heads that this process computes.

    Args:
        encoding: the encoding in force.
        model: a model loaded by transformers, with or without a plan for tensor parallelism.

    Raises:
        UnsupportedError: on every process, if the heads of a process are unknown, or tokens are split as well.
    """
    mesh = _mesh(model)
    if mesh is None:
        return
    plan = getattr(model, "tp_plan", None) or {}
    paths = {id(module): path for path, module in model.named_modules()}
    sites = [site for site in encoding.record.placed(AttentionSite) if site.encoding.shard is None]
    rule = next((name for name, style in plan.items() if style == _SEQUENCE), None)
    if rule is not None:
        raise UnsupportedError(
            f"The tensor-parallel plan of this model splits sequences between processes ({rule!r}: {_SEQUENCE!r}), so "
            "a layer sees only some of the tokens and their positions are unknown. "
            f"{encoding.config.name!r} needs all tokens: remove the sequence-parallel rules from the plan."
        )
    known: dict[int, Part] = {}
    for site in sites:
        shard = _shard(site, paths[id(site.module)], plan, mesh)
        if shard is None:
            continue
        together = 1 if site.encoding.query_key_map is None else site.encoding.query_key_map.heads_together
        local_heads = site.encoding.num_heads // shard.size
        if local_heads % together:
            raise UnsupportedError(
                f"{encoding.config.name!r} maps {together} neighbouring heads of {type(site.module).__name__} "
                f"together, but each of {shard.size} processes has {local_heads} "
                f"{'head' if local_heads == 1 else 'heads'}. Use fewer processes, so that neighbouring heads "
                "are in the same one."
            )
        site.encoding = _split(site.encoding, shard, known)
    for parameter in encoding.parameters():
        # Each process has initialised its own.
        if parameter.device.type != "meta" and not hasattr(parameter, "device_mesh"):
            torch.distributed.broadcast(parameter.data, group_src=0, group=mesh.get_group())


def _mesh(model: nn.Module) -> Any:
    """The processes that share the heads of a layer; `None` without tensor parallelism."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    manager = getattr(model, "_mesh_manager", None)
    if manager is not None:
        return manager.get_mesh("tp")
    mesh: Any = model._device_mesh
    return mesh if mesh.ndim == 1 else mesh["tp"]


def _shard(site: AttentionSite, path: str, plan: dict[str, str], mesh: Any) -> HeadShard | None:
    """The heads of one module in this process, if they divide by the number of processes; `None` if it has all."""
    styles = {
        name: plan.get(re.sub(r"\d+", "*", f"{path}.{name}"), "")
        for name, child in site.module.named_modules()
        if "_is_hooked" in child.__dict__ and name
    }
    split = [name for name, style in styles.items() if "colwise" in style and style not in _GATHERED]
    if not split:
        return None
    heads, key_heads = site.encoding.num_heads, site.encoding.num_key_value_heads
    keys = [name for name, child in site.module.named_children() if name[0] == "k" and hasattr(child, "in_features")]
    shared_keys = bool(keys) and not set(keys) & set(split)
    kind = type(site.module).__name__
    if shared_keys and key_heads > 1:
        raise UnsupportedError(
            f"The tensor-parallel plan splits the queries of {kind} across {mesh.size()} processes and keeps all "
            f"{key_heads} key heads in each of them, so it is unknown which key head a query head reads. Split "
            f"{keys[0]!r} and the values as well (style 'colwise')."
        )
    for count, what in ((heads, "query"), (mesh.size() if shared_keys else key_heads, "key")):
        if count % mesh.size():
            raise UnsupportedError(
                f"{kind} has {count} {what} {'head' if count == 1 else 'heads'}, which {mesh.size()} processes cannot "
                "share evenly under this tensor-parallel plan. Use a number of processes that divides them."
            )
    return HeadShard(mesh, shared_keys)


def _split(encoding: LayerEncoding, shard: HeadShard, known: dict[int, Part]) -> LayerEncoding:
    """The layer restricted to the heads of this process. Parts that layers share remain shared."""

    def split(part: Any) -> Any:
        if part is None:
            return None
        if id(part) not in known:
            known[id(part)] = split_part(part, shard)
        return known[id(part)]

    return dataclasses.replace(
        encoding,
        **{kind: split(getattr(encoding, kind)) for kind in KINDS_IN_LAYERS},
        num_heads=encoding.num_heads // shard.size,
        shard=shard,
        num_key_value_heads=1 if shard.shared_keys else encoding.num_key_value_heads // shard.size,
        num_cached_heads=None,
    )


def follow_in_prompts(model: PreTrainedModel, encoding: PositionEncoding, is_native: bool) -> None:
    """Gives the adaption prompts of a patched model, which have no positions, the phases of its queries.

    Raises:
        UnsupportedError: if the scheme rotates queries in another way than the stock model.
    """
    sites = encoding.record.placed(RotaryModuleSite)
    if sites and not is_native:
        ADAPTION_PROMPTS.refuse(encoding.needs(), encoding.label)
    for site in sites:
        site.neutral, site.unused = not is_native, site.unused and not is_native


def refuse_late_parameters(model: nn.Module, encoding: PositionEncoding) -> None:
    """Refuses to add parameters to a model that FSDP has sharded, or that runs in an engine of DeepSpeed with ZeRO-3.

    They manage the parameters that a module had at that time. Parameters added later would not be sharded: each process
    would initialise its own and train them on its part of the batch only.
    """
    late = [each for each in encoding.parameters() if not (hasattr(each, "device_mesh") or hasattr(each, "ds_id"))]
    if not late:
        return
    sharded = has_engine(model)
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        sharded |= any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    if sharded:
        SHARDED_WEIGHTS.refuse(encoding.needs(), encoding.label)
