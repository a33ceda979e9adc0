"""Targets for costs, and whether the figures of a run meet them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.levels import NARROW_LEVEL, SMOLLM2_LEVEL, has_smollm2_shape
from benchmarks.subjects import BARE
from benchmarks.timing import spread

_LONG = 16384
#: The schemes that a target is about, by the family of their rows or by name.
_FAMILIES = {
    "distance biases": ("distance bias",),
    "rotations": ("rotation",),
    "distance biases and rotations": ("distance bias", "rotation"),
    "additive schemes": ("additive",),
}
_CONTENT, _CONTENT_FREE = "schemes that read the content", "schemes that do not read the content"
#: Schemes that read the content, in addition to those of the family "content bias".
_READ_CONTENT = ("pope", "repo", "selective_rope", "grape_m")
#: Schemes, maximum ratio, reference model, and cells. A cell is a level, its phases and its lengths.
_ON_CPU = (
    *(
        ("distance biases", 1.25, "to_bare", level, ("forward", "train"), (4096,))
        for level in ("attention", "model", "encoder")
    ),
    ("rope", 1.05, "to_bare", "model", ("forward",), (1024, 4096)),
    ("rotations", 1.05, "to_bare", "model", ("forward",), (1024, 4096)),
    ("rope", 1.0, "to_stock", "model", ("forward", "train", "decode"), (1024, 4096)),
    ("additive schemes", 1.01, "to_bare", "model", ("forward", "train"), (1024, 4096)),
    ("all schemes that a cache can serve", 1.05, "to_bare", "model", ("decode",), (4096,)),
    *(
        (name, limit, "to_stock", SMOLLM2_LEVEL, ("forward", "decode"), ())
        for limit, names in ((1.1, ("none", "rope", "alibi", "t5", "forget_gate")), (1.25, ("self_extend",)))
        for name in names
    ),
    (_CONTENT_FREE, 1.1, "to_stock", NARROW_LEVEL, ("decode",), (32,)),
    (_CONTENT, 1.25, "to_stock", NARROW_LEVEL, ("decode",), (32,)),
    ("all schemes", 1.25, "to_stock", NARROW_LEVEL, ("train",), (32,)),
)
#: Schemes with sdpa unless they name a backend. ALiBi and forget gates should be faster than no position.
_ON_CUDA = (
    *(
        (whom, limit, over, level, ("forward", "train"), (4096, _LONG))
        for level in ("attention", SMOLLM2_LEVEL)
        for whom, limit, over in (
            ("distance biases", 1.05, "to_bare"),
            ("rotations", 1.05, "to_bare"),
            ("alibi", 1.0, "to_bare"),
            ("alibi@flex_attention", 1.0, "to_bare"),
            ("forget_gate", 1.0, "to_bare"),
            ("forget_gate@flex_attention", 1.0, "to_bare"),
            ("rope", 1.0, "to_stock"),
        )
    ),
    ("distance biases and rotations", 1.05, "to_bare", SMOLLM2_LEVEL, ("decode", "decode_batch16"), (4096, _LONG)),
)


def verdicts(content: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Yields the measured targets for the device of a run: the target, the measurement, and whether it is met."""
    return [*_ratios(content), *(() if content["settings"]["device"] == "cuda" else _memory(content))]


def _ratios(content: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    targets = _ON_CUDA if content["settings"]["device"] == "cuda" else _ON_CPU
    for whom, limit, over, level, phases, lengths in targets:
        for cell in content["cells"].values():
            # A model of another size only tests that it runs.
            of_size = level != SMOLLM2_LEVEL or has_smollm2_shape(content["settings"])
            here = (
                cell["level"] == level and cell["phase"] in phases and cell["length"] in (lengths or [cell["length"]])
            )
            rows = [row for row in cell["rows"] if here and of_size and over in row and _is_meant(row, whom)]
            if rows:
                worst = max(rows, key=lambda row: row[over]["median"])
                kept = sum(row[over]["median"] <= limit for row in rows)
                yield (
                    f"{whom}: at most {limit:g} {over.replace('_', ' ')}, {level} {cell['phase']} {cell['length']}",
                    f"{kept} of {len(rows)}; worst: {worst['subject']} {spread(worst[over])}",
                    kept == len(rows),
                )


def _is_meant(row: dict[str, Any], whom: str) -> bool:
    if whom in _FAMILIES:
        return row["family"] in _FAMILIES[whom]
    scheme = row["family"] not in ("bare", "stock", "peer")
    if whom in (_CONTENT, _CONTENT_FREE):
        reads = row["family"] == "content bias" or row["subject"] in _READ_CONTENT
        return scheme and reads == (whom == _CONTENT)
    if whom.startswith("all "):
        return scheme
    return bool(row["subject"] == whom)


def _memory(content: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """For the small Llama with distance biases: its peak relative to bare, and whether a long training step fits."""
    rows = [row for cell in content["cells"].values() for row in cell["rows"]]
    biases = {row["subject"] for row in rows if row["family"] == "distance bias"} | {"alibi", "t5", BARE}
    for phase, length in (("forward", 4096), ("train", 4096), ("train", _LONG)):
        peaks = {
            peak["subject"]: peak.get("phase_bytes", math.inf)
            for peak in content["memory"].values()
            if (peak["level"], peak["phase"], peak["length"]) == ("model", phase, length) and peak["subject"] in biases
        }
        bare = peaks.pop(BARE, math.inf)
        if peaks and bare < math.inf:
            worst = max(peaks, key=lambda name: peaks[name])
            ratio = peaks[worst] / bare
            told, met = ("at most 1.05 to bare", ratio <= 1.05) if length < _LONG else ("fits", ratio < math.inf)
            target = f"distance biases: peak memory {told}, model {phase} {length}"
            yield target, f"worst: {worst} {ratio:.3f}", met
