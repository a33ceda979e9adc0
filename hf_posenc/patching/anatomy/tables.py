"""Position tables: their weights, and the row of the first token."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.anatomy.parts import inner_part

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import StackModules

_TABLE_NAME = re.compile(r"(^|\.)(positions?_embed(ding)?s?|embed_positions?|wpe)$")
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
class OwnedTable:
    """A table with a row per token that the module which owns it adds to its input: a parameter, tensor or embedding.

    Args:
        path: path of the module below the stack; empty for the stack itself.
        module: the module that owns the table and adds it.
        name: attribute that holds the table.
        prefix_rows: number of rows before those of the input, for class tokens.
        channels_first: whether the table is `(1, hidden, rows, columns)`.
    """

    path: str
    module: Any
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
        """The table with the rows of all tokens without a place first, `(rows, hidden)`.

        Args:
            others: number of tokens without a place.
        """
        weight, behind = self.weight, others - self.prefix_rows
        if behind <= 0:
            return weight
        return torch.cat([weight[: self.prefix_rows], weight[-behind:], weight[self.prefix_rows : -behind]])


def position_tables(modules: StackModules) -> list[tuple[str, nn.Module]]:
    """Path and module of every module of a stack that is a table with a row for each position."""
    architecture, config = modules.architecture, modules.module.config
    named = modules.select(
        lambda path, module: (
            path in architecture.tables or (_TABLE_NAME.search(path) and not architecture.table_is_rotary)
        )
    )
    return [
        (path, module)
        for path, module in named
        if table_weight(module) is not None
        and not any(inner_part(above, config) for above in _on_the_way(path, modules.module))
    ]


def _on_the_way(path: str, stack: nn.Module) -> Iterator[nn.Module]:
    """The modules that lead from a stack to one inside it, which is the last of them."""
    return map(stack.get_submodule, itertools.accumulate(path.split("."), lambda above, name: f"{above}.{name}"))
