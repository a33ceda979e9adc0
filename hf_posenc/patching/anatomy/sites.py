"""The modules of a stack that use positions, as found by discovery, and what the parts of a scheme are built from.

The kinds of tokens that a stack may have are in `patching/layouts`.
"""

from __future__ import annotations

import dataclasses
import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

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
    from hf_posenc.patching.anatomy.anatomy import Anatomy
    from hf_posenc.patching.anatomy.architectures import Architecture
    from hf_posenc.patching.anatomy.discovery import PositionTable
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

    @property
    def reads_earlier_keys(self) -> bool:
        """Whether it reads the keys of an earlier layer, already mapped by its scheme (Gemma 3n and 4)."""
        return bool(getattr(self.module, "is_kv_shared_layer", False))


@dataclass
class NamedModule:
    """A module in which positions act.

    Args:
        path: its path below the stack; empty for the stack itself.
        module: the module.
    """

    path: str
    module: Any


@dataclass
class Stack:
    """One `PreTrainedModel` that owns attention layers, and all its modules that use positions.

    Args:
        name: "encoder", "decoder" or "model".
        path: path below the patched model; empty for the model itself.
        module: the stack.
        part: the part of the model that it belongs to, such as "text".
        architecture: the declaration of its architecture.
        attentions: its self-attention layers, in order.
        tables: its position tables.
        rotaries: its rotary modules.
        first_layer: the module whose input is the embedded sequence.
        hidden_size: width of the hidden states that the first layer receives.
        layout: the kind of its tokens.
        skipped: attention-like modules that are not patched, with the reason (cross-attention).
    """

    name: str
    path: str
    module: Any
    part: str
    architecture: Architecture
    attentions: list[AttentionLayer] = field(default_factory=list)
    tables: list[PositionTable] = field(default_factory=list)
    rotaries: list[NamedModule] = field(default_factory=list)
    first_layer: nn.Module | None = None
    hidden_size: int = 0
    layout: Layout = field(init=False)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def config(self) -> Any:
        """The stack's own config."""
        return self.module.config

    @property
    def causal(self) -> bool:
        """Whether its attention is causal."""
        return all(attention.causal for attention in self.attentions)

    @property
    def sparse(self) -> bool:
        """Whether some of its attention never computes the logits of all pairs of tokens."""
        return any(attention.sparse for attention in self.attentions)

    @property
    def mechanism(self) -> str | None:
        """Name of a native mechanism in its attention that a patch silences, other than a rotation; or `None`."""
        relative = (attention.relative for attention in self.attentions if attention.relative is not None)
        return self.architecture.mechanism or next((found.description for found in relative), None)

    def layers(self) -> list[int]:
        """Indices of the layers that hold attention."""
        return sorted({attention.layer for attention in self.attentions})


class Trial(Protocol):
    """A stock model that is changed for short runs. A transaction makes the changes and takes them back."""

    @property
    def anatomy(self) -> Anatomy:
        """The anatomy of the model."""

    def with_scheme(self, config: SchemeConfig, stacks: list[Stack]) -> AbstractContextManager[Any]:
        """Context manager that yields the encoding with which some stacks run."""

    def with_forwards(self, forwards: list[tuple[nn.Module, Any]]) -> AbstractContextManager[None]:
        """Context manager in which some modules have other forwards."""


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
    config = stack.config
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
