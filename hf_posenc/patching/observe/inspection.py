"""`inspect_model`: where a model's architecture uses positions, before any patch."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from hf_posenc.errors import PositionEncodingError
from hf_posenc.patching.find.discovery import find_stacks, model_parts
from hf_posenc.patching.find.grids import FoundBias
from hf_posenc.patching.find.layer_context import native_pairing, native_rotary_dim
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.find.tables import table_origin, table_weight
from hf_posenc.patching.observe.native_scheme import native_scheme
from hf_posenc.patching.place.encoding import difference
from hf_posenc.patching.place.lengths import native_length
from hf_posenc.patching.place.transaction import Transaction


@dataclass
class StackInspection:
    """One stack of attention layers.

    Args:
        name: "encoder", "decoder", "model", or the path of the stack in a composite model.
        part: the part of the model that it belongs to, such as "text".
        module_class: class of the stack.
        causal: whether its attention is causal.
        layers: indices of the layers with self-attention.
        num_heads: query heads of the first of them.
        head_dim: width of its heads.
        attention: class of its attention modules, and how they are patched.
        rotary: rotary modules and functions, with their width and pairing.
        tables: position tables, with their size and the row of the first token.
        biases: native relative biases that a patch disables.
        left_alone: attention-like modules that are never patched, with the reason.
    """

    name: str
    part: str
    module_class: str
    causal: bool
    layers: list[int]
    num_heads: int
    head_dim: int
    attention: str
    rotary: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    biases: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)


@dataclass
class Inspection:
    """The result of `inspect_model`.

    Args:
        model_class: class of the model.
        model_type: its config's model type.
        native: the native scheme of the part that `patch_model` patches by default, as a dictionary, or the reason why
            no scheme describes it.
        in_force: the scheme that the model is patched with, as a dictionary; `None` for a stock model.
        stacks: one entry per stack of attention layers.
        context: a description of the model's stated context length and of the longest sequence it accepts.
        disagreement: how a patched model differs from what was placed, for example in a field of its config that was
            set later and has no effect; empty if it does not.
        other_parts: for every other part of a composite model, its native scheme as a dictionary, or the reason why no
            scheme describes it or can replace it.
    """

    model_class: str
    model_type: str
    native: dict[str, Any] | str
    in_force: dict[str, Any] | None
    stacks: list[StackInspection]
    context: str = ""
    disagreement: str = ""
    other_parts: dict[str, dict[str, Any] | str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model_class} ({self.model_type})", f"  native scheme: {self.native}"]
        lines.extend(f"  native scheme of part {name!r}: {native}" for name, native in self.other_parts.items())
        if self.in_force is not None:
            lines.append(f"  patched with: {self.in_force}")
        if self.disagreement:
            lines.append(f"  not as it was patched: {self.disagreement}")
        lines.append(f"  context: {self.context}")
        for stack in self.stacks:
            kind = "causal" if stack.causal else "bidirectional"
            lines.append(
                f"  {stack.name} ({stack.module_class}, {stack.part}, {kind}): {len(stack.layers)} attention layers, "
                f"{stack.num_heads} heads of {stack.head_dim}"
            )
            lines.append(f"    attention: {stack.attention}")
            for title in ("rotary", "tables", "biases", "left_alone"):
                lines.extend(f"    {title.replace('_', ' ')}: {entry}" for entry in getattr(stack, title))
        return "\n".join(lines)


def inspect_model(model: PreTrainedModel) -> Inspection:
    """Reports where a model uses positions. The model is not changed. A rotary model is run on three tokens.

    Raises:
        UnsupportedError: for an architecture that cannot be patched, with the reason.
    """
    transaction = Transaction(model)
    encoding = transaction.encoding
    in_force = None if encoding is None else encoding.config.to_dict()
    change = transaction.change()
    if change:
        # In this model, the scheme could not be placed again as it was.
        stock = copy.deepcopy(transaction.model)
        Transaction(stock).undo()
        return replace(inspect_model(stock), in_force=in_force, disagreement=change)
    problem = difference(transaction.model)
    with transaction.suspended() as target:
        found = find_stacks(target)
        context = _stock_context(target, found) if encoding is None else str(encoding.lengths)
        native = _native(target, found[0].part)
        others: dict[str, dict[str, Any] | str] = {}
        for part in model_parts(target):
            if part == found[0].part:
                continue
            try:
                found.extend(find_stacks(target, [part]))
                others[part] = _native(target, part)
            except PositionEncodingError as error:
                others[part] = str(error)
        stacks = [_inspect_stack(stack) for stack in found]
        return Inspection(
            type(target).__name__, target.config.model_type, native, in_force, stacks, context, problem, others
        )


def _native(model: PreTrainedModel, part: str) -> dict[str, Any] | str:
    try:
        return native_scheme(model, part=part).to_dict()
    except PositionEncodingError as error:
        return str(error)


def _stock_context(model: PreTrainedModel, stacks: list[Stack]) -> str:
    if all(stack.grid is not None for stack in stacks):
        sizes = {stack.grid.native for stack in stacks if stack.grid is not None and stack.grid.native is not None}
        known = [f"{' x '.join(map(str, native))} patches at the image size in the config" for native in sorted(sizes)]
        return "; ".join(["follows from the size of the input", *known])
    native = native_length(model, stacks)
    if native is None:
        return "no stated length"
    ends = "; its position table ends there" if any(stack.tables for stack in stacks) else ""
    return f"{native} tokens{ends}"


def _inspect_stack(stack: Stack) -> StackInspection:
    first = stack.attentions[0]
    reach = "attention interface" if first.uses_interface else "own scores, reached while its forward runs"
    found = StackInspection(
        name=stack.name,
        part=stack.part,
        module_class=type(stack.module).__name__,
        causal=stack.causal,
        layers=stack.layers(),
        num_heads=first.num_heads,
        head_dim=first.head_dim,
        attention=f"{type(first.module).__name__} ({reach})",
        left_alone=[f"{path}: {reason}" for path, reason in stack.skipped],
    )
    functions = sorted({name for attention in stack.attentions for name in attention.rotary_functions})
    rotating = next((attention for attention in stack.attentions if attention.rotary_functions), None)
    if rotating is not None:
        modules = ", ".join(rotary.path for rotary in stack.rotaries) or "no module"
        width = native_rotary_dim(stack, rotating)
        # The width of a rotation on a grid is not known.
        dimensions = "" if width is None else f"{width} of {rotating.head_dim} dimensions, "
        pairing = native_pairing(stack, rotating)
        found.rotary.append(f"{modules} -> {', '.join(functions)}: {dimensions}{pairing or 'unknown'} pairing")
    for table in stack.tables:
        weight = table_weight(table.module)
        assert weight is not None
        found.tables.append(
            f"{table.path} ({type(table.module).__name__}): {weight.shape[0]} x {weight.shape[1]}, first token in row "
            f"{table_origin(table.module)}"
        )
    if stack.grid is not None:
        for owned in stack.grid.tables:
            rows, columns = owned.weight.shape
            start = f", first patch in row {owned.prefix_rows}" if owned.prefix_rows else ""
            size = f"{rows} x {columns}, over the patches{start}"
            found.tables.append(f"{owned.full_name} ({type(owned.module).__name__}): {size}")
        found.biases.extend(_grid_biases(stack.grid.biases))
    if stack.mechanism:
        found.biases.append(stack.mechanism)
    return found


def _grid_biases(biases: list[FoundBias]) -> list[str]:
    """A line for each kind of mechanism, with the place of the first."""
    kinds: dict[str, list[FoundBias]] = {}
    for bias in biases:
        kinds.setdefault(bias.kind, []).append(bias)
    return [f"{alike[0]}" + (f", and {len(alike) - 1} more" if len(alike) > 1 else "") for alike in kinds.values()]
