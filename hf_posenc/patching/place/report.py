"""The report of a patch: what it replaced and placed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class StackReport:
    """The changes in one stack.

    Args:
        name: "encoder", "decoder", "model", or the path of the stack in a composite model.
        part: the part of the model that the stack belongs to, such as "text".
        attention_layers: indices of the layers whose attention uses the scheme.
        replaced: native mechanisms that are disabled, as "module path: mechanism".
        placed: parts of the scheme, as "part: module path".
        kept: position-dependent behaviour of the architecture that remains active.
        adopted: parts that took over native weights.
        positions: what the scheme reads as the positions of patches; empty for other tokens.
    """

    name: str
    part: str
    attention_layers: list[int]
    replaced: list[str] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    adopted: list[str] = field(default_factory=list)
    positions: str = ""


@dataclass
class PatchReport:
    """The changes made by `patch_model`.

    Args:
        scheme: name of the scheme in force.
        model_class: class of the patched model.
        new_parameters: number of trainable scalars of the scheme.
        stacks: one entry per stack of attention layers.
        untouched: the parts of the model that keep their native positions.
        context: a description of the context length, the native length, and the longest sequence of the scheme.
    """

    scheme: str
    model_class: str
    new_parameters: int
    stacks: list[StackReport]
    untouched: list[str] = field(default_factory=list)
    context: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model_class} with {self.scheme!r}: {self.new_parameters} new parameters"]
        if self.context:
            lines.append(f"  context: {self.context}")
        if self.untouched:
            patched = " and ".join(dict.fromkeys(stack.part for stack in self.stacks))
            lines.append(f"  part: {patched}; {', '.join(self.untouched)} unchanged (choose with part=...)")
        for stack in self.stacks:
            lines.append(f"  {stack.name}: {len(stack.attention_layers)} attention layers")
            if stack.positions:
                lines.append(f"    positions: {stack.positions}")
            for title in ("replaced", "placed", "kept", "adopted"):
                entries = getattr(stack, title)
                if len(entries) > 6:  # Most entries repeat the same mechanism.
                    entries = [*entries[:2], f"... {len(entries) - 3} more ...", entries[-1]]
                lines.extend(f"    {title}: {entry}" for entry in entries)
        return "\n".join(lines)
