"""Damage to JSON and to bytes, drawn from a seeded generator."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

#: Means "absent" where a value is expected.
ABSENT = object()

#: Values that no option accepts silently, and values that only some accept.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 100, 2**20, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(2**70),
    0.5, 1.5, -0.0, 1e-300, 1e-30, 1e30, 3e38, 1e300, float("nan"), float("inf"), float("-inf"),
    "", "x", "1", "\0", "alibi", "native", "composed", "../../x", "a" * 10_000, "\U0001f4a5\ud800",
    [], [[]], [1], [None], [0.5, 0.25], {}, {"scheme": "rope"}, {"scheme": 5}, {"type": "yarn"},
    {"type": "yarn", "factor": 4}, {"type": "yarn", "factor": 4.0, "original_max_positions": 64},
]  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One mutation of a JSON document.

    Args:
        where: the keys and indices from the root.
        what: in words, for a failing test.
        value: the new value; `ABSENT` if it was removed.
        neutral: whether the document still means the same.
    """

    where: tuple[Any, ...]
    what: str
    value: Any
    neutral: bool = False

    def applied(self, document: Any) -> Any:
        """A changed copy."""
        if not self.where:
            return self.value
        changed = copy.deepcopy(document)
        holder = changed
        for key in self.where[:-1]:
            holder = holder[key]
        if self.value is ABSENT:
            del holder[self.where[-1]]
        else:
            holder[self.where[-1]] = self.value
        return changed

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.where)) or 'the whole'}: {self.what}"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a document, the document itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(document: Any, where: tuple[Any, ...]) -> Any:
    """The content at a path."""
    for key in where:
        document = document[key]
    return document


def nested(inner: Any, depth: int) -> Any:
    """A scheme inside `depth` others."""
    for _ in range(depth):
        inner = {"scheme": "position_shift", "inner": inner, "offset": 1}
    return inner


def change_of_json(document: Any, roots: list[tuple[Any, ...]], rng: Random) -> Change:
    """A random change below one of some places."""
    below = [path for root in roots for path in [root, *places(at(document, root), root)] if path]
    where = rng.choice(below)
    old = at(document, where)
    kind = rng.choice(("replace", "replace", "replace", "remove", "add", "retype", "wrap", "scale"))
    if kind == "remove":
        return Change(where, "removed", ABSENT)
    if kind == "add" and isinstance(old, dict):
        name, value = rng.choice(["x", "theta", "scheme", "type", "", "\0", "layers"]), rng.choice(VALUES)
        return Change((*where, name), f"set to {_short(value)}", value, neutral=old.get(name, ABSENT) == value)
    if kind == "retype":
        value = _retyped(old)
        return Change(where, f"{_short(old)} as {_short(value)}", value)
    if kind == "wrap":
        value = rng.choice([[old], [old, old], {"scheme": old}, {"inner": old}])
        return Change(where, f"wrapped as {_short(value)}", value)
    if kind == "scale" and isinstance(old, int | float) and not isinstance(old, bool):
        value = rng.choice([old + 1, -old, old * 10**6, old * 10**12])
        return Change(where, f"{old} -> {value}", value, neutral=value == old)
    value = rng.choice(VALUES)
    same = type(value) is type(old) and value == old
    return Change(where, f"{_short(old)} -> {_short(value)}", value, neutral=same)


def damaged_bytes(data: bytes, rng: Random, end: int | None = None) -> tuple[str, bytes]:
    """Random damage to the first `end` bytes of a file: its description, and the damaged bytes."""
    end = len(data) if end is None else end
    kind = rng.choice(("flip", "flip", "byte", "cut", "remove", "insert", "repeat", "zero"))
    start = rng.randrange(end)
    size = min(rng.choice((1, 1, 2, 8, 64)), end - start)
    if kind == "flip":
        changed = data[start] ^ (1 << rng.randrange(8))
        return f"bit of byte {start} flipped", data[:start] + bytes([changed]) + data[start + 1 :]
    if kind == "byte":
        value = rng.choice(b'\0\xff"{}[],:0-9 \n')
        return f"byte {start} set to {value}", data[:start] + bytes([value]) + data[start + 1 :]
    if kind == "cut":
        return f"cut at {start}", data[:start]
    if kind == "remove":
        return f"{size} bytes removed at {start}", data[:start] + data[start + size :]
    if kind == "insert":
        return f"{size} bytes inserted at {start}", data[:start] + rng.randbytes(size) + data[start:]
    if kind == "repeat":
        return f"{size} bytes repeated at {start}", data[: start + size] + data[start:]
    return f"{size} bytes zeroed at {start}", data[:start] + bytes(size) + data[start + size :]


def _retyped(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return float(value)
    if isinstance(value, float):
        return str(value)
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        return {str(index): item for index, item in enumerate(value)}
    return {"value": value}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
