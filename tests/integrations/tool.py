"""What a row of docs/reference/tools.md is: a tool, and a check that it computes the same with a patched model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_posenc import PositionEncodingError

#: The columns. Every mechanism is there: nothing, a bias, a learned bias, a rotation, a scaled one, a bias with
#: features in the cache, two positions for one pair, a map that widens heads, and vectors added to the embeddings.
SCHEMES: dict[str, Any] = {
    "native": "native",
    "none": "none",
    "alibi": "alibi",
    "t5": "t5",
    "rope + yarn": {
        "scheme": "rope",
        "theta": 10000.0,
        "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 16},
    },
    "forget_gate": "forget_gate",
    "self_extend": {"scheme": "self_extend", "window": 4, "group": 2},
    "pope": "pope",
    "sinusoidal": "sinusoidal",
}

EQUAL = "equal"


@dataclass(frozen=True)
class Tool:
    """One row of the table.

    Args:
        group: heading that the row stands under.
        name: the tool and the way it is used.
        check: is given a scheme from `SCHEMES`; raises `AssertionError` if the numbers differ.
        oracle: what the numbers are compared with, for the reader.
        needs: packages without which the row cannot run.
    """

    group: str
    name: str
    check: Callable[[Any], None]
    oracle: str
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def outcome(tool: Tool, scheme: Any) -> str:
    """`EQUAL`, or the reason of a refusal. Any other error is raised."""
    with warnings.catch_warnings(action="ignore"):
        try:
            tool.check(scheme)
        except PositionEncodingError as refusal:
            return str(refusal)
    return EQUAL
