"""Position tables: their weights, the row of the first token, and the formula of those that are not learned."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.anatomy.offloading import onload_weights
from hf_posenc.patching.anatomy.parts import inner_part
from hf_posenc.patching.anatomy.sites import FixedTable, NamedModule
from hf_posenc.schemes import SinusoidalConfig
from hf_posenc.schemes.additive.sinusoidal import LAYOUTS
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import AdditiveEncoding
from hf_posenc.schemes.positions import Positions

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import StackModules
    from hf_posenc.patching.anatomy.sites import Stack

_TABLE_NAME = re.compile(r"(^|\.)(positions?_embed(ding)?s?|embed_positions?|wpe)$")
#: Rows computed at a time. CTRL's table has 50,000 rows of width 1280.
_ROWS = 4096
#: Allowed error of an angle per position. Angles computed in float32 have an error of about 5e-8 times the position.
_ANGLE_ERROR = 2e-7
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
    """A module in which an architecture looks up the vectors of positions."""

    @property
    def weight(self) -> Tensor:
        """The table, `(rows, hidden)`."""
        weight = table_weight(self.module)
        assert weight is not None
        return weight

    @property
    def origin(self) -> int:
        """The row of the first real token."""
        return table_origin(self.module)


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
        """The table with the rows of all tokens without a place first, `(rows, hidden)`.

        Args:
            others: number of tokens without a place.
        """
        weight, behind = self.weight, others - self.prefix_rows
        if behind <= 0:
            return weight
        return torch.cat([weight[: self.prefix_rows], weight[-behind:], weight[self.prefix_rows : -behind]])


def position_tables(modules: StackModules) -> list[PositionTable]:
    """The modules of a stack that are tables with a row for each position."""
    architecture, config = modules.architecture, modules.module.config
    named = modules.select(
        lambda path, module: (
            path in architecture.tables or (_TABLE_NAME.search(path) and not architecture.table_is_rotary)
        )
    )
    return [
        PositionTable(path, module)
        for path, module in named
        if table_weight(module) is not None
        and not any(inner_part(above, config) for above in _on_the_way(path, modules.module))
    ]


def _on_the_way(path: str, stack: nn.Module) -> Iterator[nn.Module]:
    """The modules that lead from a stack to one inside it, which is the last of them."""
    return map(stack.get_submodule, itertools.accumulate(path.split("."), lambda above, name: f"{above}.{name}"))


def vectors_of(config: SchemeConfig, width: int) -> AdditiveEncoding | None:
    """The additive part of a scheme; `None` if it cannot be built for vectors of this width."""
    try:
        return config.build(BuildContext(hidden_size=width, num_heads=1, head_dim=width)).additive
    except (ValueError, PositionEncodingError):
        return None


def reproduces(
    config: SinusoidalConfig, rows: Tensor, origin: int, *, rounding: float = 0.0, angle_error: float = 0.0
) -> bool:
    """Whether the rows from `origin` on are the encodings of positions 0, 1, 2, ...

    Args:
        config: the formula.
        rows: `(rows, width)`.
        origin: the row of position 0.
        rounding: allowed difference, in addition to 1e-4.
        angle_error: additional allowed difference, multiplied by the position.
    """
    additive = vectors_of(config, rows.shape[1])
    if additive is None:
        return False
    for start in range(origin, rows.shape[0], _ROWS):
        found = rows[start : start + _ROWS].detach().float()
        ids = torch.arange(start - origin, start - origin + found.shape[0], device=rows.device).unsqueeze(0)
        expected = additive(Positions(ids, ids[:, -1:] + 1))[0].float()
        if not ((found - expected).abs() <= 1e-4 + rounding + angle_error * ids[0].unsqueeze(-1)).all():
            return False
    return True


def sinusoids_like(rows: Tensor, origin: int = 0) -> SinusoidalConfig | None:
    """The formula that gives the rows from `origin` on; `None` if there is none, or on the meta device."""
    rounding = 0.0 if rows.dtype == torch.float32 else torch.finfo(rows.dtype).eps
    for frequencies, layout in itertools.product(("vaswani", "tensor2tensor"), LAYOUTS):
        config = SinusoidalConfig(frequencies=frequencies, layout=layout, offset=origin)
        if not rows.is_meta and reproduces(config, rows, origin, rounding=rounding):
            return config
    return None


def check_fixed_tables(tables: list[FixedTable], stack: Stack) -> None:
    """Compares every row of an architecture's tables with their formula.

    The formula comes from the declaration of the architecture. A run on a few tokens would check only the first rows.
    Tables on the meta device are not checked.

    Raises:
        UnsupportedError: if a table has other values.
    """
    formula = SinusoidalConfig(layout="concatenated")
    for module, name in tables:
        with onload_weights(module):
            rows = getattr(module, name)
            if rows.device.type == "meta":
                continue
            if not reproduces(formula, rows, 0, rounding=torch.finfo(rows.dtype).eps, angle_error=_ANGLE_ERROR):
                raise UnsupportedError(
                    f"`{name}` of a {type(module).__name__} in this {type(stack.module).__name__} does not match the "
                    "declaration of its architecture: its rows are not the usual sines and cosines of their positions "
                    "(base 10000), and no scheme describes it. Any scheme can replace it, and unpatch_model restores "
                    "it."
                )
