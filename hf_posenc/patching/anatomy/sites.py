"""The modules of a model that use positions, as found by discovery."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_posenc.schemes.config import SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.architectures import Architecture
    from hf_posenc.patching.anatomy.tables import PositionTable
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
        num_cached_heads: number of key heads that it caches: fewer, if it repeats them behind the cache (JetMoe).
        head_dim: width of a head.
        layer_type: the layer's entry in `config.layer_types`, if there is one.
        causal: whether queries see only keys at or before them.
        window: sizes of the windows of patches that it states, `(rows, columns)`.
        relative: its relative mechanism, or `None`.
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
        layout: what its tokens are.
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
    def mechanism(self) -> str | None:
        """Name of a native mechanism in its attention that a patch silences, other than a rotation; or `None`."""
        relative = (attention.relative for attention in self.attentions if attention.relative is not None)
        return self.architecture.mechanism or next((found.description for found in relative), None)

    def layers(self) -> list[int]:
        """Indices of the layers that hold attention."""
        return sorted({attention.layer for attention in self.attentions})
