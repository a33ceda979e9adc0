"""Native mechanisms in attention over patches: tables and networks of displacements, flags and rotations."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.architectures.silencers import zero_bias_of
from hf_posenc.patching.anatomy.sites import NamedModule
from hf_posenc.patching.call.placed_forward import ZeroOutput, forward_on_instance, unrotated
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.schemes import SwinConfig
from hf_posenc.schemes.config import SchemeConfig

#: - "module": a module whose output is the bias (Swin, BEiT).
#: - "table": a parameter of the attention module, which looks it up itself (Donut, MaskFormer).
#: - "network": a network of the displacement (Swin v2).
#: - "flag": an attribute that turns the bias on (SAM's decomposed table, ViTDet).
#: - "rotation": a method of the attention module that rotates one tensor at a time (V-JEPA 2).
BiasKind = Literal["module", "table", "network", "flag", "rotation"]

_BIAS_TABLE = "relative_position_bias_table"
_ATTRIBUTES: dict[str, BiasKind] = {
    _BIAS_TABLE: "table",
    "continuous_position_bias_mlp": "network",
    "use_rel_pos": "flag",
    "use_relative_position_embeddings": "flag",
    "apply_rotary_embeddings": "rotation",
}
_NAMES: dict[BiasKind, str] = {
    "module": "bias table over displacements",
    "table": "bias table over displacements",
    "network": "bias network of displacements",
    "flag": "decomposed bias tables",
    "rotation": "rotation",
}
#: Rows of a table for pairs with a class token.
_CLASS_ROWS = 3


@dataclass
class GridBias(NamedModule):
    """One native mechanism in the attention of a grid.

    Args:
        name: the attribute that holds the mechanism; empty for the module itself.
        kind: how it is disabled.
    """

    name: str
    kind: BiasKind

    @property
    def table(self) -> Tensor | None:
        """The `(displacements, heads)` table of the bias; `None` for other mechanisms."""
        found = getattr(self.module, _BIAS_TABLE, None)
        return found if self.kind in ("module", "table") and isinstance(found, Tensor) else None

    @property
    def window(self) -> tuple[int, int] | None:
        """The sizes of the window that the table is for."""
        size = getattr(self.module, "window_size", None)
        if isinstance(size, int):
            return size, size
        return (int(size[0]), int(size[1])) if isinstance(size, tuple | list) else None

    def acts_on(self, attention_path: str) -> bool:
        """Whether the bias is that of an attention module: inside it, beside it, or above it."""
        owner = self.path.rpartition(".")[0] if self.kind == "module" else self.path
        return not owner or f"{attention_path}.".startswith(f"{owner}.") or self.path.startswith(f"{attention_path}.")

    def __str__(self) -> str:
        return f"{self.path}: {_NAMES[self.kind]}"

    def silence(self, journal: Any) -> None:
        """Disables the mechanism and freezes its weights."""
        module, name = self.module, self.name
        if self.kind == "module":
            journal.set(module, "forward", functools.partial(zero_bias_of, module))
            journal.freeze_all(module)
        elif self.kind == "network":
            network = getattr(module, name)
            journal.set_forward(network, ZeroOutput(network))
            journal.freeze_all(network)
        elif self.kind == "flag":
            journal.set(module, name, False)
            for own in module._parameters:
                if "rel_pos" in own:
                    journal.freeze(module, own)
        elif self.kind == "rotation":
            journal.set(module, name, unrotated)
        else:
            site = forward_on_instance(module)
            assert isinstance(site, ScoresAttention)
            site.zero_tables = [name]
            journal.freeze(module, name)


def find_biases(modules: Iterable[tuple[str, nn.Module]]) -> list[GridBias]:
    """The native mechanisms of modules, by path."""
    found = []
    for path, module in modules:
        if type(module).__name__.endswith("RelativePositionBias"):
            found.append(GridBias(path, module, "", "module"))
            continue
        for name, kind in _ATTRIBUTES.items():
            # A flag of a module without parameters of its own only repeats a setting.
            repeats = kind == "flag" and not any("rel_pos" in own for own in module._parameters)
            value = getattr(module, name, None)
            if value is not None and value is not False and not repeats:
                found.append(GridBias(path, module, name, kind))
    return found


def window_of(attention: nn.Module, config: Any) -> tuple[int, ...] | None:
    """Sizes of the windows that an attention module states.

    The module of a bias states the sizes of its table. In a model without windows, they are not those of a window.
    """
    for module in attention.modules():
        if hasattr(module, _BIAS_TABLE) and not hasattr(config, "window_size"):
            continue
        size = getattr(module, "window_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return (size, size)
        if isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(one, int) for one in size):
            return tuple(size)
    return None


def bias_scheme(biases: list[GridBias], stack: nn.Module) -> SchemeConfig | None:
    """The scheme of the biases of a stack; `None` without any.

    Raises:
        UnsupportedError: if no scheme describes them.
    """
    if not biases:
        return None
    if any(bias.table is None for bias in biases):
        raise UnsupportedError(
            f"The native mechanism in the attention of {type(stack).__name__} ({biases[0]}) is not among the "
            "schemes of this library. Any scheme can replace it, and unpatch_model restores it."
        )
    found = set()
    for bias in biases:
        table, window = bias.table, bias.window
        assert table is not None
        rows = 0 if window is None else math.prod(2 * size - 1 for size in window)
        if window is None or table.shape[0] - rows not in (0, _CLASS_ROWS):
            raise UnsupportedError(
                f"{bias} has {table.shape[0]} rows, which are not the displacements in a window of {window}, so its "
                "native scheme cannot be described. Any scheme can replace it."
            )
        found.add(SwinConfig(grid=window, class_entries=table.shape[0] > rows, shared=len(biases) == 1))
    if len(found) > 1:
        raise UnsupportedError(
            f"The layers of {type(stack).__name__} have windows of different sizes, which a single scheme "
            "cannot describe. Any scheme can replace them, and unpatch_model restores them."
        )
    return found.pop()
