"""Finding the modules of a model that use positions, by their structure instead of by model name."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.architectures import Architecture, architecture_of
from hf_posenc.patching.find.forward_code import (
    INTERFACE,
    is_of_transformers,
    names_used,
    parameters_of,
    rotary_names,
    unknown_seam,
)
from hf_posenc.patching.find.grids import find_grid, window_of
from hf_posenc.patching.find.model_parts import (
    PartOwner,
    check_part,
    default_part,
    part_owners,
    reads_features,
    reads_pixels,
    reads_spectrogram,
    takes_pixels,
)
from hf_posenc.patching.find.relative import find_relative
from hf_posenc.patching.find.series import find_series
from hf_posenc.patching.find.sites import AddedModule, FoundAttention, FoundModule, Stack
from hf_posenc.patching.find.tables import table_weight

_CROSS = re.compile(r"cross|encoder_attn|encdec|encoder_decoder|x_attn", re.IGNORECASE)
_ADAPTER = re.compile(r"(^|\.)adapter\.")
_TABLE_NAME = re.compile(r"(^|\.)(positions?_embed(ding)?s?|embed_positions?|wpe)$")
#: What a stack names that asks bidirectional modules for causal attention: the text model of CLIP.
_CAUSAL_CALL = {"create_causal_mask", "is_causal"}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_q_heads", "encoder_attention_heads")
_HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head", "d_head")
#: Config attributes for the width of embeddings.
WIDTHS = ("hidden_size", "d_model", "n_embd", "emb_dim", "dim")


def find_stacks(model: PreTrainedModel, parts: Collection[str] | None = None) -> list[Stack]:
    """The stacks of parts of a model, with their attention layers, tables and rotary modules.

    Args:
        model: the model.
        parts: names of parts; by default the one that is patched if none is named.

    Raises:
        UnsupportedError: if there is none, or the architecture is not supported.
        UnknownNameError: for a part that the model does not have.
    """
    owners = attention_owners(model)
    known = list(dict.fromkeys(owner.part for owner in owners))
    wanted = [default_part(model, known)] if parts is None else [check_part(one, known, model) for one in parts]
    stacks = []
    for owner, name in zip(owners, _names(owners, model), strict=True):
        if owner.part in wanted:
            architecture = architecture_of(owner.module.config)
            _refuse_declared(owner.module, architecture)
            stacks.append(_read_stack(owner, name, architecture))
    return stacks


def attention_owners(model: PreTrainedModel) -> list[PartOwner]:
    """Every `PreTrainedModel` inside a model that owns self-attention layers, with the name of its part.

    Raises:
        UnsupportedError: if there is none.
    """
    _refuse_declared(model, architecture_of(model.config))
    owners = [owner for owner in part_owners(model) if next(self_attentions(owner.module), None) is not None]
    inside = {id(module) for owner in owners for _, module in own_modules(owner.module)}
    owners = [owner for owner in owners if id(owner.module) not in inside]
    if not owners:
        raise UnsupportedError(
            f"{type(model).__name__} has no softmax self-attention (module classes: "
            f"{', '.join(sorted({type(module).__name__ for module in model.modules()})[:12])}), so a position encoding "
            "cannot be placed in it. If one of them is an attention class, add it to `attention_classes` with "
            "hf_posenc.register_architecture."
        )
    return owners


def model_parts(model: PreTrainedModel) -> list[str]:
    """The names of the parts of a model that have self-attention."""
    return list(dict.fromkeys(owner.part for owner in attention_owners(model)))


def _refuse_declared(model: PreTrainedModel, architecture: Architecture) -> None:
    refusal = architecture.refusal(model.config)
    if refusal:
        raise UnsupportedError(f"{type(model).__name__} ({model.config.model_type}) cannot be patched: {refusal}")


def own_modules(stack: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules below a stack that do not belong to another stack inside it."""
    pending = [("", stack)]
    while pending:
        prefix, module = pending.pop()
        children = []
        for name, child in module.named_children():
            if not _is_inside(child, stack):
                continue
            path = f"{prefix}.{name}" if prefix else name
            children.append((path, child))
        yield from children
        pending.extend(reversed(children))


def _is_inside(child: nn.Module, stack: nn.Module) -> bool:
    """Whether a child belongs to a stack, and is not a stack of its own.

    Many vision models keep their layers in an encoder that is a `PreTrainedModel`, but receives embedded patches.
    """
    if not isinstance(child, PreTrainedModel):
        return not isinstance(child, AddedModule)
    same = isinstance(stack, PreTrainedModel) and type(child.config) is type(stack.config)
    return same and reads_pixels(stack) and not takes_pixels(child)


def _read_stack(owner: PartOwner, name: str, architecture: Architecture) -> Stack:
    module = owner.module
    modules = sorted(own_modules(module), key=lambda item: natural_order(item[0]))
    if reads_features(module):
        modules = _in_definition_order(module)[1:]
    stack = Stack(name, owner.path, module, hidden_size=0, part=owner.part, architecture=architecture)
    for place, candidate in _attentions(modules, architecture):
        reason = _reason_to_skip(place, candidate, module)
        if reason is not None:
            stack.skipped.append((place, reason))
        else:
            _refuse_indexer(place, candidate)
            stack.attentions.append(_read_attention(place, candidate, module, len(stack.attentions), architecture))
    _refuse_other_attention(stack, modules)
    if stack.attentions and (reads_pixels(module) or reads_spectrogram(module.config)):
        suffix = architecture.suffix_tokens
        suffix = suffix(module.config) if callable(suffix) else suffix
        stack.grid = find_grid(_in_definition_order(module), module.config, suffix)
    for place, candidate in modules:
        if stack.grid is None and _is_table(place, candidate, module, architecture):
            stack.tables.append(FoundModule(place, candidate))
        elif "Rotary" in type(candidate).__name__ and "position_ids" in parameters_of(type(candidate).forward):
            stack.rotaries.append(FoundModule(place, candidate))
    if stack.attentions and stack.grid is None and reads_features(module):
        stack.series = find_series(module, modules, [found.path for found in stack.tables])
    _refuse_two_sequences(stack)
    projection = None if stack.grid is None else stack.grid.projection
    stack.first_layer = _first_layer(module, stack.attentions[0].path, projection)
    stack.hidden_size = _hidden_size(module, stack)
    return stack


def _in_definition_order(stack: nn.Module) -> list[tuple[str, nn.Module]]:
    """The stack and the modules of `own_modules`, each followed by those inside it."""
    own = dict(own_modules(stack))
    return [(path, module) for path, module in stack.named_modules() if not path or own.get(path) is module]


def self_attentions(stack: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every self-attention layer that belongs to a stack."""
    for place, candidate in _attentions(list(own_modules(stack)), architecture_of(stack.config)):
        if _reason_to_skip(place, candidate, stack) is None:
            yield place, candidate


def _reason_to_skip(place: str, candidate: nn.Module, stack: Any) -> str | None:
    """Why an attention module of a stack is left alone; `None` if it is patched."""
    named = _CROSS.search(place) or _CROSS.search(type(candidate).__name__)
    if named or getattr(candidate, "is_cross_attention", False) is True:
        return "cross-attention: its keys belong to another sequence"
    if reads_features(stack) and _ADAPTER.search(place):
        return "attention of an adapter, which has no positions"
    left_alone = architecture_of(stack.config).left_alone
    if left_alone is not None and re.search(left_alone[0], place):
        return left_alone[1]
    part = _inner_part(candidate, stack.config)
    return None if part is None else f"it belongs to {part}, a part that is not a separate model (PreTrainedModel)"


def _inner_part(module: nn.Module, config: Any) -> str | None:
    """The part of a stack that a module belongs to, if its config is not that of the stack, but one inside it."""
    own = getattr(module, "config", None)
    names = (name for name, inner in config.__dict__.items() if isinstance(inner, PreTrainedConfig) and inner is own)
    name = next(names, None)
    return None if name is None else name.removesuffix("_config")


def tables(stack: nn.Module, architecture: Architecture) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every position table that belongs to a stack."""
    if isinstance(stack, PreTrainedModel) and reads_pixels(stack):
        return
    for place, candidate in own_modules(stack):
        if _is_table(place, candidate, stack, architecture):
            yield place, candidate


def grid_table_owners(stack: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every module inside a stack of patches that owns a position table."""
    if isinstance(stack, PreTrainedModel) and reads_pixels(stack):
        for table in find_grid(_in_definition_order(stack), stack.config).sites():
            if table.module is not stack:
                yield table.path, table.module


def _attentions(modules: list[tuple[str, nn.Module]], architecture: Architecture) -> list[tuple[str, nn.Module]]:
    if architecture.attention_classes:
        return [(p, m) for p, m in modules if type(m).__name__ in architecture.attention_classes]
    return [(p, m) for p, m in modules if _uses_interface(m)] or [(p, m) for p, m in modules if _computes_scores(m)]


def _is_table(place: str, module: nn.Module, stack: nn.Module, architecture: Architecture) -> bool:
    named = place in architecture.tables or (_TABLE_NAME.search(place) and not architecture.table_is_rotary)
    if not named or table_weight(module) is None:
        return False
    config = getattr(stack, "config", None)
    if config is None:
        return True
    around = itertools.accumulate(place.split("."), lambda path, name: f"{path}.{name}")
    return all(_inner_part(stack.get_submodule(path), config) is None for path in around)


def _read_attention(
    path: str, module: nn.Module, stack: PreTrainedModel, order: int, architecture: Architecture
) -> FoundAttention:
    config = stack.config
    forward = inspect.unwrap(type(module).forward)
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    layer = numbers[0] if numbers else order
    layer_types = getattr(config, "layer_types", None)
    layer_type = getattr(module, "layer_type", None) or getattr(module, "attention_type", None)
    if layer_type is None and layer_types and layer < len(layer_types):
        layer_type = layer_types[layer]
    num_heads, head_dim = _head_shape(module, config, architecture)
    return FoundAttention(
        path=path,
        module=module,
        layer=layer,
        uses_interface=_uses_interface(module),
        rotary_functions=rotary_names(forward),
        num_heads=num_heads,
        num_key_value_heads=_key_value_heads(module, num_heads, architecture),
        head_dim=head_dim,
        layer_type=layer_type if isinstance(layer_type, str) else None,
        causal=_is_causal(module, stack, architecture),
        window=window_of(module, config) if reads_pixels(stack) else None,
        relative=find_relative(module),
    )


def _is_causal(module: nn.Module, stack: PreTrainedModel, architecture: Architecture) -> bool:
    """Whether attention is causal, according to the declaration, or else to the stack and the attention module.

    An attention module with `is_causal=False` may still be causal because of its mask, as in the decoders of NLLB-MoE,
    BigBird-Pegasus, and UMT5 before transformers 5.18. A decoder stack therefore counts as causal.
    `refuse_misread_causality` checks such contradictions by running the model.
    """
    if architecture.causal is not None:
        return architecture.causal(stack.config) if callable(architecture.causal) else architecture.causal
    own = getattr(module, "is_causal", None)
    if reads_pixels(stack):
        return own is True
    kind = type(stack).__name__
    encodes = "Encoder" in kind
    is_decoder = "Decoder" in kind or any(getattr(one, "is_decoder", False) for one in (stack.config, stack))
    # BART's encoder does not follow an `is_decoder` in the config, which its decoder shares.
    decodes = is_decoder and not (encodes and own is False)
    if own is True or decodes or names_used(type(stack).forward) >= _CAUSAL_CALL:
        return True
    if own is False or encodes:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return stack.config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _uses_interface(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and INTERFACE in code.co_names and INTERFACE in forward.__globals__


def _computes_scores(module: nn.Module) -> bool:
    """Whether a module is an innermost attention module: "Attention" in its class name, with parameters."""
    if "Attention" not in type(module).__name__ or next(module.parameters(), None) is None:
        return False
    below = (child for child in module.modules() if child is not module)
    return not any("Attention" in type(child).__name__ for child in below)


def _refuse_other_attention(stack: Stack, modules: list[tuple[str, nn.Module]]) -> None:
    """Refuses attention of other code in a stack of transformers that would keep its positions, or lose its code."""
    if not is_of_transformers(type(stack.module).__module__):
        return
    known = {found.path for found in stack.attentions} | {path for path, _ in stack.skipped}
    places = {_LAYER.sub("*", found.path, count=1) for found in stack.attentions}
    layers = {path.removesuffix(_LAYER.split(path, maxsplit=1)[-1]) for path in known}
    lists = {layer.rpartition(".")[0] for layer in layers}
    for path, module in modules:
        layer, forward = path.removesuffix(_LAYER.split(path, maxsplit=1)[-1]), type(module).forward
        alone = layer not in layers and layer.rpartition(".")[0] in lists and _computes_scores(module)
        if not alone and _LAYER.sub("*", path, count=1) not in places:
            continue
        # Layers of a stock model may have different attention, but it is defined in transformers.
        own = is_of_transformers(forward.__module__) and not (alone and forward.__module__.startswith("torch."))
        if path not in known and not own:
            raise UnsupportedError(
                f"{path} ({type(module).__name__}, defined in {forward.__module__}) is no attention that hf_posenc "
                f"recognises, in contrast to that of other layers, so no scheme would act in it. Let its forward use "
                f"the names {INTERFACE} and apply_rotary_pos_emb, imported into its file, as those of transformers do."
            )
        while path in known and hasattr(forward, "__wrapped__"):
            if not is_of_transformers(forward.__globals__["__name__"]):
                raise UnsupportedError(
                    f"The forward of the class {type(module).__name__} ({path}) is wrapped by code of "
                    f"{forward.__globals__['__name__']}, which a scheme would bypass. Take the wrapper off the class."
                )
            forward = forward.__wrapped__


def _refuse_indexer(path: str, module: nn.Module) -> None:
    for child in module.modules():
        if "Indexer" in type(child).__name__:
            raise UnsupportedError(
                f"{path} ({type(module).__name__}) attends only to keys that its {type(child).__name__} selects by "
                "separate rotary scores. A scheme cannot be placed in such sparse attention, because the selection "
                "would keep the native positions."
            )


def _refuse_two_sequences(stack: Stack) -> None:
    sides = {attention.path.split(".")[0] for attention in stack.attentions} & {"encoder", "decoder"}
    if len(sides) == 2:
        raise UnsupportedError(
            f"The encoder and the decoder of {type(stack.module).__name__} are not separate models (PreTrainedModel), "
            "so the positions of the two sequences in one call cannot be told apart."
        )


def _head_shape(module: nn.Module, config: Any, architecture: Architecture) -> tuple[int, int]:
    if architecture.head_shape is not None:
        return architecture.head_shape(module, config)
    num_heads = first_int(module, _HEADS) or first_int(config, _HEADS)
    if not num_heads:
        raise unknown_seam(
            f"{type(module).__name__} has no known attribute for its number of heads (tried {', '.join(_HEADS)})."
        )
    head_dim = first_int(module, _HEAD_DIMS) or first_int(config, ("head_dim", "d_kv"))
    if not head_dim:
        head_dim = int(first_int(config, WIDTHS)) // num_heads
    return num_heads, head_dim


def _key_value_heads(module: nn.Module, num_heads: int, architecture: Architecture) -> int:
    """The number of key heads that the attention function receives; MLA expands its keys before."""
    if architecture.key_value_heads is not None:
        return architecture.key_value_heads(module)
    groups = first_int(module, ("num_key_value_groups", "num_queries_per_kv"))
    if groups:
        return num_heads // groups
    return first_int(module, ("num_key_value_heads", "num_kv_heads")) or num_heads


def first_int(holder: Any, names: tuple[str, ...], default: int = 0) -> int:
    """The first of some attributes that is an integer."""
    found = (getattr(holder, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), default)


def _first_layer(stack: nn.Module, attention_path: str, projection: nn.Module | None) -> nn.Module | None:
    """The module `layers.0` for an attention at `layers.<n>....`; `None` if layers are not in a list.

    A stage that projects pixels to patches contains its layers, and is none.
    """
    parts = attention_path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            parent = stack.get_submodule(".".join(parts[:index])) if index else stack
            first = next(iter(parent.children()), None)
            if first is None or projection is None or all(module is not projection for module in first.modules()):
                return first
    return None


def _hidden_size(stack: PreTrainedModel, found: Stack) -> int:
    if found.tables:
        weight = table_weight(found.tables[0].module)
        assert weight is not None
        return int(weight.shape[1])
    if found.grid is not None and found.grid.tables:
        return int(found.grid.tables[0].weight.shape[1])
    if found.grid is not None and found.grid.projection is not None:
        return int(found.grid.projection.out_channels)
    if found.series is not None and found.series.parameters:
        return int(found.series.parameters[0].weight.shape[1])
    return first_int(stack.config, WIDTHS)


def _names(owners: list[PartOwner], model: PreTrainedModel) -> list[str]:
    """The names of the stacks of a model, by their paths below the base model.

    Classes with another head, or with one stack less, have the same names, because they load the same checkpoints.
    """
    base = "" if model.base_model is model else model.base_model_prefix
    own = [_name(owner.path, base) for owner in owners]
    short = ["decoder" if "decoder" in name else "encoder" if "encoder" in name else name for name in own]
    return own if len(set(short)) < len(short) else short


def _name(path: str, base: str) -> str:
    if path == base:
        return "model"
    return path.removeprefix(f"{base}.").replace(".", "_") or "head"


def natural_order(path: str) -> list[tuple[int, Any]]:
    """A sort key that puts "layers.10" after "layers.9"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in path.split(".")]
