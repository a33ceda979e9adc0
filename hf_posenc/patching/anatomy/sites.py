"""The modules in which positions act, as discovery finds them: attention layers and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.patching.anatomy.weights import shape_of, stored
from hf_posenc.patching.forwards import OtherForward, forward_on_instance, unrotated, zero_output
from hf_posenc.schemes.config import SchemeConfig

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
        projection: a linear layer that the bias is proportional to, or a module that rotates heads. It is disabled by
            `instead` of its forward. `None` if the module passes the bias on as an argument, which is dropped.
        names: names of the weights and submodules that only the mechanism uses.
        method: the method that rotates the module's input, or `None`.
        instead: what replaces the forward of `projection`.
    """

    description: str
    scheme: SchemeConfig | None
    weight: Tensor | None = None
    projection: nn.Module | None = None
    names: tuple[str, ...] = ()
    method: str | None = None
    instead: Callable[..., Any] = zero_output

    def silence(self, module: nn.Module, journal: Any) -> None:
        """Disables it in its attention module and freezes its weights."""
        if self.projection is not None and not isinstance(forward_on_instance(self.projection), OtherForward):
            journal.set_forward(self.projection, OtherForward(self.projection, self.instead))
        if self.method is not None:
            journal.replace(module, self.method, unrotated)
        journal.freeze(module, *self.names)


@dataclass
class AttentionLayer:
    """One self-attention layer.

    Args:
        path: module path below the stack.
        module: the attention module.
        layer: index of the decoder or encoder layer it belongs to.
        uses_interface: whether it goes through transformers' attention interface.
        num_heads: number of query heads.
        num_key_value_heads: number of key heads.
        num_cached_heads: number of key heads that it caches: fewer, if it repeats them after the cache (JetMoe).
        head_dim: width of a head.
        rotary_functions: names of the rotary functions its forward calls.
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
    num_heads: int
    num_key_value_heads: int
    num_cached_heads: int
    head_dim: int
    rotary_functions: list[str] = field(default_factory=list)
    layer_type: str | None = None
    causal: bool = False
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

    @property
    def full_name(self) -> str:
        """Path of what is found below the stack."""
        return self.path


#: Attributes that hold the weight of a position table.
WEIGHT_NAMES = ("weight", "weights")


def table_weight(module: nn.Module) -> Tensor | None:
    """The `(rows, hidden)` tensor of a table module: a parameter, a buffer or a plain attribute."""
    name = _name_of_table(module)
    return None if name is None else getattr(module, name)


def _name_of_table(module: nn.Module) -> Any:
    # By name, because the weight of PEFT's wrapper is another tensor each time.
    weights = ((name, getattr(module, name, None)) for name in WEIGHT_NAMES)
    return next((name for name, weight in weights if isinstance(weight, Tensor) and len(shape_of(weight)) == 2), None)


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
        return stored(self.module, _name_of_table(self.module))

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
    #: The rows of tokens without a place count too.
    origin: ClassVar[int] = 0

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
        value = self.value
        module, name = (value, _name_of_table(value)) if isinstance(value, nn.Module) else (self.module, self.name)
        weight = stored(module, name)
        return weight[0].flatten(1).T if self.channels_first else weight.reshape(-1, weight.shape[-1])

    def in_order_of_tokens(self, others: int) -> Tensor:
        """The table with the rows of all tokens without a place first, `(rows, hidden)`."""
        weight, behind = self.weight, others - self.prefix_rows
        if behind <= 0:
            return weight
        return torch.cat([weight[: self.prefix_rows], weight[-behind:], weight[self.prefix_rows : -behind]])
