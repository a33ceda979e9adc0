"""Native biases and rotations of attention on a grid, found by what their modules are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

#: - "module": a module whose output is the bias (Swin, BEiT).
#: - "table": a parameter of the attention module, which looks it up itself (Donut, MaskFormer).
#: - "network": a network of the displacement (Swin v2).
#: - "flag": an attribute that turns the bias on (SAM's decomposed table, ViTDet).
#: - "rotation": a method of the attention module that rotates one tensor at a time (V-JEPA 2).
BiasKind = Literal["module", "table", "network", "flag", "rotation"]

_TABLE = "relative_position_bias_table"
_ATTRIBUTES: dict[str, BiasKind] = {
    _TABLE: "table",
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


@dataclass
class FoundBias:
    """One native mechanism in the attention of a grid.

    Args:
        path: path of the module below the stack.
        module: the module.
        name: the attribute that holds the mechanism; empty for the module itself.
        kind: how it is disabled.
    """

    path: str
    module: Any
    name: str
    kind: BiasKind

    @property
    def table(self) -> Tensor | None:
        """The `(displacements, heads)` table of the bias; `None` for other mechanisms."""
        found = getattr(self.module, _TABLE, None)
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


def find_biases(modules: Iterable[tuple[str, nn.Module]]) -> list[FoundBias]:
    """The native mechanisms of modules, by path."""
    found = []
    for path, module in modules:
        if type(module).__name__.endswith("RelativePositionBias"):
            found.append(FoundBias(path, module, "", "module"))
            continue
        for name, kind in _ATTRIBUTES.items():
            if _is_set(getattr(module, name, None)) and not _is_config(name, module):
                found.append(FoundBias(path, module, name, kind))
    return found


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _is_config(name: str, module: nn.Module) -> bool:
    """Whether the attribute only repeats a setting: modules without parameters of their own have no bias."""
    return _ATTRIBUTES[name] == "flag" and not any("rel_pos" in own for own in module._parameters)
