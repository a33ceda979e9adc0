"""One measured property of one scheme."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One property of one scheme.

    Args:
        passed: whether the scheme has the property; `None` where it does not apply to this scheme, or nothing of it
            could be evaluated.
        value: the number that decided.
        threshold: what it was compared with.
        details: further numbers.
        refused: what the scheme would not compute, with its own reason, such as positions past a table.
        reason: why the property does not apply.
        shown: what a table shows in place of the value, where that does not say why the property failed.
    """

    passed: bool | None
    value: float | None = None
    threshold: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    reason: str | None = None
    shown: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; infinite and undefined numbers become their names, which JSON has no number for."""
        entry: dict[str, Any] = _json_ready(dataclasses.asdict(self))
        return entry


def does_not_apply(reason: str) -> Measurement:
    """The property says nothing about this scheme."""
    return Measurement(None, reason=reason)


def not_evaluated(refused: list[str]) -> Measurement:
    """The scheme refused everything the property needs."""
    return Measurement(None, refused=tuple(refused), reason="the scheme refuses all positions that were asked for")


def _json_ready(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
