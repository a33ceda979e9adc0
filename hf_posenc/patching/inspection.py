"""`native_scheme` and what schemes take from it, `inspect_model`, and whether an inference engine can run a model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from hf_posenc.errors import PositionEncodingError, UnsupportedError, warn_user
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.discovery import native_pairing, native_rotary_dim, spans_of
from hf_posenc.patching.anatomy.native_scheme import find_native_scheme
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.patching.place.config_entry import at_native_lengths
from hf_posenc.patching.place.encoding import current_encoding, difference
from hf_posenc.patching.place.lengths import native_length
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.preserve import ordinary_context
from hf_posenc.schemes.arrangement.native import asked_scalings, with_native
from hf_posenc.schemes.config import SchemeConfig, names_native, walk
from hf_posenc.schemes.needs import Environment
from hf_posenc.schemes.registry import scheme_from_dict
from hf_posenc.schemes.rotary.scaling import RopeScaling


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
        left_alone: attention-like modules in which no scheme is placed, with the reason.
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
        lines = [f"{self.model_class} ({self.model_type})", f"  native scheme: {_words(self.native)}"]
        lines.extend(f"  native scheme of part {name!r}: {_words(native)}" for name, native in self.other_parts.items())
        if self.in_force is not None:
            lines.append(f"  patched with: {_words(self.in_force)}")
        if self.disagreement:
            lines.append(f"  changed after it was patched: {self.disagreement}")
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


def _words(scheme: dict[str, Any] | str) -> str:
    """A scheme as exports print it, or the reason why there is none."""
    return scheme if isinstance(scheme, str) else scheme_from_dict(scheme).label


def native_scheme(model: PreTrainedModel, *, part: str | None = None) -> SchemeConfig:
    """The scheme of a stock model, or of one part of a composite model, with its parameters.

    `patch_model(model, native_scheme(model))` reproduces the stock outputs. To verify this, a rotary model is run once
    on three tokens, and a model with a declared mechanism, or with code of others, twice on eight tokens: unchanged,
    and with the scheme in place. Every row of a sinusoidal table is compared with its formula. A stack in which no
    mechanism is found is run twice on three tokens, in two orders. For a patched model, the scheme of the underlying
    stock model is returned.

    Args:
        model: a transformers model, or a PEFT model around one.
        part: the part of a composite model; by default the one that `patch_model` patches by default.

    Raises:
        UnsupportedError: if the architecture cannot be patched, if no scheme describes its mechanism, or if the
            mechanism does not match the declaration of the architecture.
    """
    return native_scheme_of(Transaction(model), part)


@ordinary_context()
def native_scheme_of(transaction: Transaction, part: str | None = None) -> SchemeConfig:
    """`native_scheme` of the model of a transaction."""
    with transaction.suspended():
        stacks = transaction.verified_stacks(transaction.anatomy.part(part))
        return find_native_scheme(transaction, stacks)


def resolve_native(transaction: Transaction, part: str, config: SchemeConfig, stacks: list[Stack]) -> SchemeConfig:
    """Returns `config` with every `NativeConfig` replaced by the native scheme.

    Warns if a scaling that the model has is replaced.

    Args:
        transaction: that of the model.
        part: the part that gets the scheme.
        config: the scheme that the caller asks for.
        stacks: the stacks of the part.

    Raises:
        UnsupportedError: if the native scheme is unknown; for a scaling of a model whose attention reads it elsewhere.
        ValueError: for a scaling of a native scheme that cannot have it.
    """
    if not names_native(config):
        return config
    native = native_scheme_of(transaction, part)
    with at_native_lengths(transaction.model.config):
        resolved = with_native(config, native, spans_of(stacks))
    asked = asked_scalings(config)
    if asked:
        _refuse_scaled_softmax(stacks, asked)
        scalings = {scaling for scheme in walk(native) if (scaling := getattr(scheme, "scaling", None)) is not None}
        replaced = scalings - {getattr(scheme, "scaling", None) for scheme in walk(resolved)}
        if replaced:
            warn_user(
                f"NativeConfig.scaling replaces the scaling that this model was trained with ({replaced.pop()}), so "
                "that texts within its length are read differently, too. Its factor and original_max_positions refer "
                "to the rotation without any scaling."
            )
    return resolved


def _refuse_scaled_softmax(stacks: list[Stack], asked: list[RopeScaling]) -> None:
    """Refuses a scaling if the attention computed a factor of its softmax from `rope_parameters` when it was built, as
    DeepSeek's attention does from `mscale_all_dim`.
    """
    for stack in stacks:
        factor = (getattr(stack.config, "rope_parameters", None) or {}).get("mscale_all_dim")
        if not factor and not any(getattr(scaling, "mscale_all_dim", None) for scaling in asked):
            continue
        for attention in stack.attentions:
            if hasattr(sys.modules[type(attention.module).__module__], "yarn_get_mscale"):
                raise UnsupportedError(
                    f"{type(attention.module).__name__} takes a factor of its softmax from `mscale_all_dim` when it is "
                    "built, which NativeConfig.scaling would not change. Load the model with the scaling instead: "
                    "from_pretrained(..., rope_parameters={...})."
                )


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
        # The scheme could not be placed again as it was, so a copy of the model is unpatched.
        stock = copy.deepcopy(transaction.model)
        Transaction(stock).undo()
        return replace(inspect_model(stock), in_force=in_force, disagreement=change)
    problem = difference(transaction.model)
    with transaction.suspended() as target:
        anatomy = transaction.anatomy
        stacks = anatomy.stacks()
        context = _stock_context(target, stacks) if encoding is None else str(encoding.lengths)
        native = _native(transaction, anatomy.main)
        others = {part: _native(transaction, part) for part in anatomy.parts if part != anatomy.main}
        for part in others:
            with suppress(PositionEncodingError):  # It is the reason in `others`.
                stacks = [*stacks, *anatomy.stacks([part])]
        placed = {} if encoding is None else {name: stack.cross for name, stack in encoding.stacks.items()}
        inspected = [_inspect_stack(stack, placed.get(stack.name, {})) for stack in stacks]
        return Inspection(
            type(target).__name__, target.config.model_type, native, in_force, inspected, context, problem, others
        )


def _native(transaction: Transaction, part: str) -> dict[str, Any] | str:
    try:
        return native_scheme_of(transaction, part).to_dict()
    except PositionEncodingError as error:
        return str(error)


def _stock_context(model: PreTrainedModel, stacks: list[Stack]) -> str:
    by_input = [stack.layout.stated_length() for stack in stacks]
    if None not in by_input:
        return "; ".join(sorted({str(length) for length in by_input}))
    native = native_length(model, stacks)
    if native is None:
        return "no stated length"
    ends = "; its position table ends there" if any(stack.tables for stack in stacks) else ""
    return f"{native} tokens{ends}"


def _inspect_stack(stack: Stack, across: Container[str]) -> StackInspection:
    first = stack.attentions[0]
    reach = "attention interface" if first.uses_interface else "own scores, reached while its forward runs"
    reach = "sparse, so only vectors can be added to embeddings" if first.sparse else reach
    inspection = StackInspection(
        name=stack.name,
        part=stack.part,
        module_class=type(stack.module).__name__,
        causal=stack.causal,
        layers=stack.layers(),
        num_heads=first.num_heads,
        head_dim=first.head_dim,
        attention=f"{type(first.module).__name__} ({reach})",
        left_alone=[f"{path}: {reason}" for path, reason in stack.skipped if path not in across],
    )
    functions = sorted({name for attention in stack.attentions for name in attention.rotary_functions})
    rotating = next((attention for attention in stack.attentions if attention.rotary_functions), None)
    if rotating is not None:
        modules = ", ".join(rotary.path for rotary in stack.rotaries) or "no module"
        width = native_rotary_dim(stack, rotating)
        # The width of a rotation on a grid is not known.
        dimensions = "" if width is None else f"{width} of {rotating.head_dim} dimensions, "
        pairing = native_pairing(stack, rotating)
        inspection.rotary.append(f"{modules} -> {', '.join(functions)}: {dimensions}{pairing or 'unknown'} pairing")
    inspection.tables, inspection.biases = stack.layout.described(stack)
    if stack.mechanism:
        inspection.biases.append(stack.mechanism)
    return inspection


#: Fields with which configs state the number of experts in a layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def unsupported_kind(config: Any) -> str:
    """The kind of a model that the plug-ins do not support, as the subject of a sentence; empty if they support it."""
    try:
        is_composite = config.get_text_config() is not config
    except ValueError:  # The config contains several text configs.
        is_composite = True
    if is_composite:
        return f"A {config.model_type!r} model has several parts, such as for images or sound"
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        return f"This {config.model_type!r} model is a mixture of experts"
    return ""


def engine_problem(model: Any, engine: Environment) -> str:
    """Why an engine cannot run the scheme of a patched model, as a clause about the scheme; empty if it can."""
    encoding = current_encoding(model)
    assert encoding is not None
    if encoding.config.part_names is not None:
        return "the plug-in runs text-only models, and this model has parts for images or sound"
    layers = [layer for stack in encoding.stacks.values() for layer in stack.layers]
    if len(encoding.stacks) != 1 or not all(layer.causal for layer in layers):
        return "the plug-in runs decoders that generate text, and this model has an encoder"
    for site in encoding.record.placed(AttentionSite):
        if not isinstance(site, InterfaceAttention):
            return (
                f"{type(site.module).__name__} computes its scores without the attention interface of transformers, "
                "which the engine needs to call its kernels"
            )
    return next(stack.problems[engine.name] for stack in encoding.stacks.values())
