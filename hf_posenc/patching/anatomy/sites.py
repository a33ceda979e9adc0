"""The modules of a stack that use positions, as found by discovery, and what the parts of a scheme are built from.

The kinds of tokens that a stack may have are in `patching/layouts`.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.rotary_functions import (
    first_angles,
    has_inverse_frequencies,
    has_layer_types,
    inverse_frequencies_of,
    pairing,
)
from hf_posenc.patching.forwards import forward_parameters
from hf_posenc.schemes.config import BuildContext, SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.discovery import Stack
    from hf_posenc.patching.layouts.layout import Layout

#: A position table that is not added to hidden states: the module that holds it, and the name of the attribute.
FixedTable = tuple[nn.Module, str]


class AddedModule(nn.Module):
    """A module that a patch has added to the module tree. Discovery does not look inside it."""


@dataclass(frozen=True)
class RelativeMechanism:
    """The relative mechanism of one attention module: a bias that depends on the query, or a rotation of its input.

    Args:
        description: its name, for reports.
        scheme: the scheme that computes the same, or `None`.
        weight: the native weights, as the `adopt` of that scheme takes them.
        projection: a linear layer that the bias is proportional to. Zeros in place of its output disable the bias.
            `None` if the module passes the bias on as an argument, which is dropped.
        names: names of the weights and submodules that only the mechanism uses.
        method: the method that rotates the module's input, or `None`.
    """

    description: str
    scheme: SchemeConfig | None
    weight: Tensor | None = None
    projection: nn.Module | None = None
    names: tuple[str, ...] = ()
    method: str | None = None


@dataclass
class AttentionLayer:
    """One self-attention layer.

    Args:
        path: module path below the stack.
        module: the attention module.
        layer: index of the decoder or encoder layer it belongs to.
        uses_interface: whether it goes through transformers' attention interface.
        rotary_functions: names of the rotary functions its forward calls.
        num_heads: number of query heads.
        num_key_value_heads: number of key heads.
        num_cached_heads: number of key heads that it caches: fewer, if it repeats them after the cache (JetMoe).
        head_dim: width of a head.
        layer_type: the layer's entry in `config.layer_types`, if there is one.
        causal: whether queries see only keys at or before them.
        window: sizes of the windows of patches that it states, `(rows, columns)`.
        relative: its relative mechanism, or `None`.
        sparse: whether it never computes the logits of all pairs of tokens. It is not patched, and takes no scheme.
        reads_earlier_keys: whether it reads the keys of an earlier layer, already mapped (Gemma 3n and 4).
    """

    path: str
    module: Any
    layer: int
    uses_interface: bool
    rotary_functions: list[str]
    num_heads: int
    num_key_value_heads: int
    num_cached_heads: int
    head_dim: int
    layer_type: str | None
    causal: bool
    window: tuple[int, ...] | None = None
    relative: RelativeMechanism | None = None
    sparse: bool = False
    reads_earlier_keys: bool = False


@dataclass
class NamedModule:
    """A module in which positions act.

    Args:
        path: its path below the stack; empty for the stack itself.
        module: the module.
    """

    path: str
    module: Any


#: Attributes that hold the weight of a position table.
WEIGHT_NAMES = ("weight", "weights")


def table_weight(module: nn.Module) -> Tensor | None:
    """The `(rows, hidden)` tensor of a table module: a parameter, a buffer or a plain attribute."""
    for name in WEIGHT_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, Tensor) and value.dim() == 2:
            return value
    return None


def table_origin(module: nn.Module) -> int:
    """The row of the first real token.

    OPT and BART have an `offset`; fairseq's tables (RoBERTa, M2M100) start after the padding row.
    """
    offset = getattr(module, "offset", None)
    if isinstance(offset, int) and offset > 0 and not hasattr(module, "create_position_ids_from_input_ids"):
        return offset
    padding_idx = getattr(module, "padding_idx", None)
    return 0 if padding_idx is None else int(padding_idx) + 1


@dataclass
class PositionTable(NamedModule):
    """A module in which an architecture looks up the vectors of positions.

    Args:
        rows_before: number of rows before that of the first token which the module does not show.
    """

    rows_before: int = 0

    @property
    def weight(self) -> Tensor:
        """The table, `(rows, hidden)`."""
        weight = table_weight(self.module)
        assert weight is not None
        return weight

    @property
    def origin(self) -> int:
        """The row of the first real token."""
        return self.rows_before + table_origin(self.module)


@dataclass
class OwnedTable(NamedModule):
    """A table with a row per token that `module` owns and adds to its input: a parameter, tensor or embedding.

    Args:
        name: attribute that holds the table.
        prefix_rows: number of rows before those of the input, for class tokens.
        channels_first: whether the table is `(1, hidden, rows, columns)`.
    """

    name: str
    prefix_rows: int
    channels_first: bool = False

    @property
    def full_name(self) -> str:
        """Path of the table below the stack."""
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def value(self) -> Any:
        """The parameter, tensor or embedding that holds the table."""
        return getattr(self.module, self.name)

    @property
    def weight(self) -> Tensor:
        """The table, `(rows, hidden)`."""
        weight = table_weight(self.value) if isinstance(self.value, nn.Module) else self.value
        assert isinstance(weight, Tensor)
        if self.channels_first:
            return weight[0].flatten(1).T
        return weight.reshape(-1, weight.shape[-1])

    def in_order_of_tokens(self, others: int) -> Tensor:
        """The table with the rows of all tokens without a place first, `(rows, hidden)`."""
        weight, behind = self.weight, others - self.prefix_rows
        if behind <= 0:
            return weight
        return torch.cat([weight[: self.prefix_rows], weight[-behind:], weight[self.prefix_rows : -behind]])


_KINDS: list[type[Layout]] = []


def register_layouts(*kinds: type[Layout]) -> None:
    """Registers kinds of tokens. The first one that recognises a model is taken."""
    _KINDS.extend(kinds)


def layout_of(module: PreTrainedModel) -> type[Layout]:
    """The kind of tokens of a stack, or of a part of a model. With `input_ids`, it is a kind that takes tokens."""
    reads_ids = "input_ids" in forward_parameters(type(module))
    return next(kind for kind in _KINDS if (kind.takes_tokens or not reads_ids) and kind.recognises(module))


def build_context(stack: Stack, attention: AttentionLayer) -> BuildContext:
    """The `BuildContext` of one attention layer."""
    config = stack.module.config
    max_positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    table = stack.layout.table(stack)
    max_positions = max_positions if table is None else table.shape[0]
    logit_terms = stack.architecture.logit_terms
    deviation = getattr(config, "initializer_range", None) or getattr(config, "init_std", None)
    return BuildContext(
        hidden_size=stack.hidden_size,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        rotary_dim=native_rotary_dim(stack, attention),
        causal=attention.causal,
        max_positions=max_positions if isinstance(max_positions, int) and max_positions > 0 else None,
        num_key_value_heads=attention.num_key_value_heads,
        # Zamba's shared layers read the embeddings in addition to the hidden states.
        layer_input_size=getattr(attention.module, "attention_hidden_size", None),
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
    own = getattr(attention.module, "rotary_dim", None)
    own = own if isinstance(own, int) and own > 0 else None
    if not stack.rotaries:
        return own
    rotary = stack.rotaries[0].module
    if has_inverse_frequencies(rotary, attention.layer_type):
        return 2 * int(inverse_frequencies_of(rotary, attention.layer_type).shape[-1])
    # Some architectures do not rotate in layers of one type.
    return None if has_layer_types(rotary) else own or 2 * first_angles(rotary, 2).shape[-1]


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
