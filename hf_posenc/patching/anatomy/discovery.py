"""Reads the layers of a stack and its tables, by their structure instead of by model name, and what a scheme is built
for in each layer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.architectures import Architecture, has_stock_code
from hf_posenc.patching.anatomy.rotary_functions import (
    first_angles,
    has_inverse_frequencies,
    has_layer_types,
    inverse_frequencies_of,
    pairing,
)
from hf_posenc.patching.anatomy.sites import AttentionLayer, PositionTable, RelativeMechanism, table_weight
from hf_posenc.patching.anatomy.weights import stored
from hf_posenc.patching.forwards import (
    INTERFACE,
    forward_parameters,
    functions_called,
    is_of_transformers,
    names_used,
    unknown_seam,
    unrotated_heads,
    written_in,
)
from hf_posenc.schemes import ShawConfig, TransformerXLConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Stack

#: The config attribute with the number of tokens in the position table of an encoder that reads features.
SOURCE_LENGTH = "max_source_positions"


def inner_part(module: nn.Module, config: Any) -> str | None:
    """The part of a stack that a module belongs to, if its config is a sub-config of the stack's config."""
    module_config = getattr(module, "config", None)
    inside = ((name, inner) for name, inner in config.__dict__.items() if isinstance(inner, PreTrainedConfig))
    name = next((name for name, inner in inside if inner is module_config), None)
    return None if name is None else name.removesuffix("_config")


_TABLE_NAME = re.compile(r"(^|\.)(positions?_embed(ding)?s?|embed_positions?|wpe)$")


def position_tables(stack: Stack) -> list[PositionTable]:
    """The modules of a stack that are tables with a row for each position."""
    architecture = stack.architecture
    name = None if architecture.table_is_rotary else _TABLE_NAME
    named = stack.select(lambda path, module: path in architecture.tables or (name and name.search(path)))
    return [
        PositionTable(path, module, architecture.rows_before)
        for path, module in named
        if table_weight(module) is not None
        and not any(
            f"{path}.".startswith(f"{above}.") and inner_part(member, stack.config) for above, member in stack.members
        )
    ]


_CROSS = re.compile(r"cross|encoder_attn|encdec|encoder_decoder|x_attn", re.IGNORECASE)
#: Why cross-attention is left alone if it gets no scheme.
CROSS_ATTENTION = "cross-attention: its keys belong to another sequence"
#: Names in the code of a stack that asks bidirectional modules for causal attention, such as the text model of CLIP.
_CAUSAL_CALL = {"create_causal_mask", "is_causal"}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_q_heads", "encoder_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEAD_DIMS = (
    "qk_head_dim", "q_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head",
    "d_head",
)  # fmt: skip
#: The method of a Conformer's attention that rotates its input, before queries and keys are projected.
_ROTATES_INPUT = "_apply_rotary_embedding"
#: Arguments of a module that rotates a query and its key, or both in one tensor.
_HEADS_TOGETHER = re.compile(r"self (qkv|\S+ (k|key))\b")
#: Config attributes for the width of embeddings.
WIDTHS = ("hidden_size", "d_model", "n_embd", "emb_dim", "dim")


def attentions_of(stack: Stack) -> list[tuple[str, nn.Module, str | None]]:
    """Path and module of everything in a stack that computes attention, and why it is left alone, or `None`."""
    declared = stack.architecture.attention_classes
    if declared:
        attentions = stack.select(lambda path, module: type(module).__name__ in declared)
    else:
        forwards = {type(module).forward for _, module in stack.members}
        through_interface = {forward for forward in forwards if _uses_interface(forward)}
        attentions = stack.select(lambda path, module: type(module).forward in through_interface)
        attentions = attentions or stack.select(lambda path, module: _computes_scores(module))
    return [(path, module, _reason_to_skip(path, module, stack)) for path, module in attentions]


def _reason_to_skip(path: str, attention: nn.Module, stack: Stack) -> str | None:
    """Why an attention module of a stack is left alone; `None` if it is patched."""
    named = _CROSS.search(path) or _CROSS.search(type(attention).__name__)
    if named or getattr(attention, "is_cross_attention", False) is True:
        return CROSS_ATTENTION
    if "AttentionPool" in type(attention).__name__:
        return "it pools tokens with learned queries, which have no positions"
    for left_alone in (stack.kind.left_alone, stack.architecture.left_alone):
        if left_alone is not None and re.search(left_alone[0], path):
            return left_alone[1]
    part = inner_part(attention, stack.module.config)
    return None if part is None else f"it belongs to {part}, a part that is not a separate model (PreTrainedModel)"


def read_attentions(stack: Stack) -> list[AttentionLayer]:
    """The self-attention layers of a stack, in order.

    Raises:
        UnsupportedError: for attention that a scheme would bypass.
    """
    layers: list[AttentionLayer] = []
    for path, module in stack.self_attentions:
        _refuse_indexer(path, module)
        layers.append(_read_self_attention(path, module, stack, len(layers)))
    _refuse_other_attention(stack)
    sides = {path.split(".")[0] for path, _ in stack.self_attentions} & {"encoder", "decoder"}
    if len(sides) == 2:
        raise UnsupportedError(
            f"The encoder and the decoder of {type(stack.module).__name__} are not separate models (PreTrainedModel), "
            "so the positions of the two sequences in one call cannot be told apart. In your own code, derive both "
            "classes from PreTrainedModel."
        )
    return layers


def _read_self_attention(path: str, module: nn.Module, stack: Stack, order: int) -> AttentionLayer:
    config, architecture = stack.module.config, stack.architecture
    attention = _read_attention(path, module, stack, order)
    rotary = functions_called(inspect.unwrap(type(module).forward))
    for function in rotary.values():
        if architecture.pairing is None and not is_of_transformers(written_in(function)):
            pairing(function)
    layer_types = getattr(config, "layer_types", None)
    layer_type = getattr(module, "layer_type", None) or getattr(module, "attention_type", None)
    if layer_type is None and layer_types and attention.layer < len(layer_types):
        layer_type = layer_types[attention.layer]
    return dataclasses.replace(
        attention,
        rotary_functions=[*rotary],
        num_cached_heads=min(first_int(module, _KEY_HEADS) or attention.num_cached_heads, attention.num_cached_heads),
        layer_type=layer_type if isinstance(layer_type, str) else None,
        causal=_is_causal(module, stack),
        window=stack.kind.window_of(module, config),
        relative=_find_relative(module),
        sparse=bool(architecture.sparse) and architecture.is_sparse(module, config),
        reads_earlier_keys=bool(getattr(module, "is_kv_shared_layer", False)),
    )


def cross_attentions(stack: Stack) -> list[AttentionLayer]:
    """The cross-attention layers of a stack, in order."""
    return [_read_attention(path, module, stack, order) for order, (path, module) in enumerate(stack.cross_attentions)]


def _read_attention(path: str, module: nn.Module, stack: Stack, order: int) -> AttentionLayer:
    """What is known of an attention layer of any kind, the `order`-th of its stack."""
    architecture = stack.architecture
    layer = next((int(part) for part in path.split(".") if part.isdigit()), order)
    num_heads, head_dim = _head_shape(module, stack.module.config, architecture)
    key_heads = _key_value_heads(module, num_heads, architecture)
    uses_interface = _uses_interface(type(module).forward)
    return AttentionLayer(path, module, layer, uses_interface, num_heads, key_heads, key_heads, head_dim)


def _is_causal(module: nn.Module, stack: Stack) -> bool:
    """Whether attention is causal, according to the declaration, or else to the stack and the attention module.

    An attention module with `is_causal=False` may still be causal because of its mask, as in the decoders of NLLB-MoE,
    BigBird-Pegasus, and UMT5 before transformers 5.18. A decoder stack therefore counts as causal.
    `refuse_misread_causality` checks such contradictions by running the model.
    """
    declared, of_kind = stack.architecture.causal, stack.kind.is_causal(module)
    if declared is not None:
        return declared(stack.config) if callable(declared) else declared
    if of_kind is not None:
        return of_kind
    stated = getattr(module, "is_causal", None)
    kind = type(stack.module).__name__
    encodes = "Encoder" in kind
    holders = (stack.module.config, stack.module)
    is_decoder = "Decoder" in kind or any(getattr(holder, "is_decoder", False) for holder in holders)
    # BART's encoder does not follow an `is_decoder` in the config, which its decoder shares.
    decodes = is_decoder and not (encodes and stated is False)
    if stated is True or decodes or names_used(type(stack.module).forward) >= _CAUSAL_CALL:
        return True
    if stated is False or encodes:
        return False
    from transformers.models.auto import modeling_auto

    if stack.config.model_type in modeling_auto.CONFIG_MAPPING_NAMES and has_stock_code(stack.module):
        return stack.config.model_type not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    # In other code, a model that is not causal has no use for a cache.
    return any("past_key" in name or "cache" in name for name in forward_parameters(type(stack.module)))


@functools.lru_cache(maxsize=1024)
def _uses_interface(forward: Any) -> bool:
    """Whether the forward of a class calls transformers' attention interface."""
    innermost = inspect.unwrap(forward)
    code = getattr(innermost, "__code__", None)
    return code is not None and INTERFACE in code.co_names and INTERFACE in innermost.__globals__


def _computes_scores(module: nn.Module) -> bool:
    """Whether a module is an innermost attention module: it has parameters, and the name for attention."""
    kinds: list[tuple[nn.Module, Any]] = [(each, type(each)) for each in module.modules()]
    if not _is_attention(kinds[0][1]):
        return False
    named = (each for each, kind in kinds if _is_attention(kind))
    return [each for each in named if next(each.parameters(), None) is not None] == [module]


@functools.lru_cache(maxsize=1024)
def _is_attention(kind: Any) -> bool:
    """Whether a class, or one that it extends, has "Attention" in its name."""
    return "Attention" in " ".join([each.__name__ for each in kind.__mro__])


def _refuse_other_attention(stack: Stack) -> None:
    """Refuses attention of other code in a stack of transformers that would keep its positions, or lose its code."""
    if not is_of_transformers(type(stack.module).__module__):
        return
    known = {path for path, _, _ in stack.computing_attention}
    places = {_LAYER.sub("*", path, count=1) for path, _ in stack.self_attentions}
    layers = {path.removesuffix(_LAYER.split(path, maxsplit=1)[-1]) for path in known}
    lists = {layer.rpartition(".")[0] for layer in layers}
    for path, module in stack.members:
        layer, forward = path.removesuffix(_LAYER.split(path, maxsplit=1)[-1]), type(module).forward
        alone = layer not in layers and layer.rpartition(".")[0] in lists and _computes_scores(module)
        if not alone and _LAYER.sub("*", path, count=1) not in places:
            continue
        # Layers of a stock model may have different attention, but it is defined in transformers.
        is_stock = is_of_transformers(forward.__module__) and not (alone and forward.__module__.startswith("torch."))
        if path not in known and not is_stock:
            raise UnsupportedError(
                f"{path} ({type(module).__name__}, defined in {forward.__module__}) is not attention that hf_posenc "
                f"recognises, unlike that of other layers, so no scheme would act in it. Let its forward use the names "
                f"{INTERFACE} and apply_rotary_pos_emb, imported into its file, as transformers' own classes do."
            )
        while path in known and hasattr(forward, "__wrapped__"):
            if not is_of_transformers(written_in(forward)):
                raise UnsupportedError(
                    f"The forward of the class {type(module).__name__} ({path}) is wrapped by code of "
                    f"{written_in(forward)}, which a scheme would bypass. Remove the wrapper."
                )
            forward = forward.__wrapped__


def _refuse_indexer(path: str, module: nn.Module) -> None:
    for child in module.modules():
        if "Indexer" in type(child).__name__:
            raise UnsupportedError(
                f"{path} ({type(module).__name__}) attends only to keys that its {type(child).__name__} selects with "
                "separate queries and keys. No scheme acts in that selection, so it would keep its native positions. "
                "Use an architecture without an indexer; in a model of several modalities, `part` chooses another part."
            )


def _head_shape(module: nn.Module, config: Any, architecture: Architecture) -> tuple[int, int]:
    if architecture.head_shape is not None:
        return architecture.head_shape(module, config)
    num_heads = first_int(module, _HEADS) or first_int(config, _HEADS)
    if not num_heads:
        raise unknown_seam(
            f"{type(module).__name__} has no known attribute for its number of heads (tried {', '.join(_HEADS)}).",
            module,
        )
    head_dim = first_int(module, _HEAD_DIMS) or first_int(config, ("head_dim", "d_kv"))
    if not head_dim:
        # The stages of a model for images differ in width, which then only their modules state.
        head_dim = (first_int(config, WIDTHS) or first_int(module, (*WIDTHS, "embed_dim"))) // num_heads
    if not head_dim:
        raise unknown_seam(
            f"{type(module).__name__} has no known attribute for the width of its heads (tried "
            f"{', '.join(_HEAD_DIMS)}), or for that of all of them together (tried {', '.join(WIDTHS)}).",
            module,
        )
    return num_heads, head_dim


def _key_value_heads(module: nn.Module, num_heads: int, architecture: Architecture) -> int:
    """The number of key heads that the attention function receives; MLA expands its keys before."""
    if architecture.key_value_heads is not None:
        return architecture.key_value_heads(module)
    groups = first_int(module, ("num_key_value_groups", "num_queries_per_kv"))
    return num_heads // groups if groups else first_int(module, _KEY_HEADS) or num_heads


def first_int(holder: Any, names: tuple[str, ...], default: int = 0) -> int:
    """The first of some attributes that is an integer."""
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), default)


def _find_relative(module: Any) -> RelativeMechanism | None:
    """The relative mechanism of an attention module, or `None` if it has none."""
    if isinstance(getattr(module, "distance_embedding", None), nn.Embedding):
        return _shaw(module)
    if isinstance(getattr(module, "linear_pos", None), nn.Linear) and hasattr(module, "pos_bias_u"):
        weight = _transformer_xl(stored(module.linear_pos), stored(module, "pos_bias_u"), stored(module, "pos_bias_v"))
        names = ("linear_pos", "pos_bias_u", "pos_bias_v")
        return RelativeMechanism("Transformer-XL bias", TransformerXLConfig(), weight, None, names)
    if isinstance(getattr(module, "relative_k_proj", None), nn.Linear) and hasattr(module, "bias_u"):
        projection = module.relative_k_proj
        # The module itself adds `bias_u` to its queries, so the scheme adds the rest.
        content, position = stored(module, "bias_u").detach(), stored(module, "bias_v").detach()
        weight = _transformer_xl(stored(projection), torch.zeros_like(content), position - content)
        return RelativeMechanism(
            "Transformer-XL bias", TransformerXLConfig(), weight, projection, ("relative_k_proj", "bias_v")
        )
    if getattr(module, "position_embeddings_type", None) == "rotary" and hasattr(module, _ROTATES_INPUT):
        return RelativeMechanism("rotation of the input before its projections", None, method=_ROTATES_INPUT)
    for name, child in module.named_children():
        kind = type(child)
        if "rotary" in kind.__name__.lower() and _HEADS_TOGETHER.match(" ".join(forward_parameters(kind))):
            return RelativeMechanism(
                f"rotation by {kind.__name__}", None, None, child, (name,), instead=unrotated_heads
            )
    return None


def _shaw(module: Any) -> RelativeMechanism | None:
    ahead = getattr(module, "right_max_position_embeddings", None)
    behind = getattr(module, "left_max_position_embeddings", None)
    if not isinstance(ahead, int) or not isinstance(behind, int):
        return None
    scheme = ShawConfig(max_distance=behind, max_distance_ahead=ahead)
    weight = stored(module.distance_embedding)
    return RelativeMechanism("relative keys", scheme, weight, None, ("distance_embedding",))


def _transformer_xl(projection: Tensor, content: Tensor, position: Tensor) -> Tensor:
    """`(heads * head_dim, hidden + 2)`: the projection of sines, then of cosines, and the two biases.

    The architectures interleave sines and cosines.
    """
    columns = [projection[:, 0::2], projection[:, 1::2], content.reshape(-1, 1), position.reshape(-1, 1)]
    return torch.cat([column.detach() for column in columns], dim=1)


def build_context(stack: Stack, attention: AttentionLayer) -> BuildContext:
    """The `BuildContext` of one attention layer."""
    config = stack.module.config
    table = stack.layout.table(stack)
    stated = first_int(config, ("max_position_embeddings", "n_positions"))
    max_positions = stated if table is None else table.shape[0]
    logit_terms = stack.architecture.logit_terms
    deviation = getattr(config, "initializer_range", None) or getattr(config, "init_std", None)
    return BuildContext(
        hidden_size=stack.hidden_size,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        rotary_dim=native_rotary_dim(stack, attention),
        causal=attention.causal,
        max_positions=max_positions if max_positions > 0 else None,
        num_key_value_heads=attention.num_key_value_heads,
        # Zamba's shared layers read the embeddings in addition to the hidden states, MobileBERT's read narrower ones.
        layer_input_size=getattr(attention.module, "attention_hidden_size", None)
        or getattr(getattr(attention.module, "query", None), "in_features", None),
        initializer_range=deviation if isinstance(deviation, float) and deviation > 0 else 0.02,
        logit_terms=1 if logit_terms is None else logit_terms(attention.module),
    )


def spans_of(stacks: list[Stack]) -> list[str | None]:
    """The type of every layer, up to the last one with attention; `None` where no window is known.

    Models such as Mistral have one window for all layers. It limits distances if it is no longer than the trained
    length, so the config must have its native lengths.
    """
    types: dict[int, str | None] = {}
    for stack in stacks:
        config = stack.config
        # A config that differs between layers refuses to read an attribute of all.
        window = None if getattr(config, "is_heterogeneous", False) else getattr(config, "sliding_window", None)
        longest = getattr(config, "max_position_embeddings", None) or 0
        windowed = isinstance(window, int) and 0 < window <= longest and getattr(config, "use_sliding_window", True)
        for attention in stack.attentions:
            types[attention.layer] = attention.layer_type or ("sliding_attention" if windowed else None)
    return [types.get(layer) for layer in range(max(types) + 1)]


def native_rotary_dim(stack: Stack, attention: AttentionLayer) -> int | None:
    """The number of dimensions of a head that the architecture rotates in this layer; `None` if it rotates none."""
    if not attention.rotary_functions:
        return None
    if stack.layout.has_axes:
        return None  # Rotations on a grid use whole heads, and their modules have frequencies for one axis of several.
    stated = first_int(attention.module, ("rotary_dim",)) or None
    if not stack.rotaries:
        return stated
    rotary = stack.rotaries[0].module
    if has_inverse_frequencies(rotary, attention.layer_type):
        return 2 * int(inverse_frequencies_of(rotary, attention.layer_type).shape[-1])
    # Some architectures do not rotate in layers of one type.
    return None if has_layer_types(rotary) else stated or 2 * first_angles(rotary, 2).shape[-1]


def with_layout(config: SchemeConfig, stack: Stack, attention: AttentionLayer) -> SchemeConfig:
    """The config with every unset layout replaced by the pairing that the architecture was trained with."""
    children = config.children().items()
    config = config.with_children({place: with_layout(child, stack, attention) for place, child in children})
    if not config.leaves_layout_open:
        return config
    rotary: Any = config
    return dataclasses.replace(rotary, layout=stack.architecture.pairing or native_pairing(stack, attention) or "half")


def native_pairing(stack: Stack, attention: AttentionLayer) -> str | None:
    """The pairing of the layer's native rotary function, or `None` if it has none."""
    if not attention.rotary_functions:
        return None
    forward = inspect.unwrap(type(attention.module).forward)
    return pairing(forward.__globals__[native_rotary_function(attention)])


def native_rotary_function(attention: AttentionLayer) -> str:
    """The name of the rotary function that a layer uses; if its code has two, the one its config selects."""
    names = attention.rotary_functions
    if len(names) == 1:
        return names[0]
    interleave = getattr(attention.module.config, "rope_interleave", None)
    matching = [name for name in names if ("interleave" in name) == bool(interleave)]
    if interleave is None or len(matching) != 1:
        raise UnsupportedError(
            f"{attention.path} has several rotary functions ({', '.join(names)}), and its config does not show which "
            "one is used."
        )
    return matching[0]
