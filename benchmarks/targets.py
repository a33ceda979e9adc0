"""What was promised, and whether the figures of a run keep it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.lineup import BARE, SMOLLM2_LEVEL
from benchmarks.subjects import has_smollm2_shape

_LEVELS = {
    "attention": "one attention call",
    "model": "a small Llama",
    "encoder": "a small BERT",
    "smollm2": "the shape of SmolLM2-135M",
}
_PHASES = {"forward": "forward", "train": "training step", "decode": "one token behind a cache"}
_BATCHED = {"decode_batch16": "a token for each of 16 sequences behind a cache"}
_LONG = 16384


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured.

    Args:
        target: in words.
        measured: the figure of the worst scheme, or what would have to be measured.
        met: `None` where nothing was measured.
    """

    target: str
    measured: str
    met: bool | None


def verdicts(content: dict[str, Any]) -> list[Verdict]:
    """All targets that apply to the device of a run.

    Args:
        content: of `results.json`.
    """
    cuda = content["settings"]["device"] == "cuda"
    return list(_on_cuda(content) if cuda else _on_cpu(content))


def _on_cpu(content: dict[str, Any]) -> Iterator[Verdict]:
    for level in ("attention", "model", "encoder"):
        for phase in ("forward", "train"):
            yield _ratio(content, "distance biases", 1.25, level, phase, 4096, families=("distance bias",))
    for phase in ("forward", "train"):
        yield _memory(content, "distance biases", 1.05, phase, 4096)
    yield _runs_long(content)
    for length in (1024, 4096):
        yield _ratio(content, "rope", 1.05, "model", "forward", length, names=("rope",))
        yield _ratio(content, "all rotations", 1.05, "model", "forward", length, families=("rotation",))
        for phase in _PHASES:
            yield _ratio(
                content, "rope, over stock RoPE", 1.0, "model", phase, length, names=("rope",), over="to_stock"
            )
        for phase in ("forward", "train"):
            yield _ratio(content, "additive schemes", 1.01, "model", phase, length, families=("additive",))
    yield _ratio(content, "all schemes that a cache can serve", 1.05, "model", "decode", 4096)
    yield from _at_smollm2(content)


def _at_smollm2(content: dict[str, Any]) -> Iterator[Verdict]:
    """Over stock, where it was measured."""
    for phase in ("forward", "decode"):
        cells = [cell for cell in content["cells"].values() if (cell["level"], cell["phase"]) == ("smollm2", phase)]
        for length in sorted(cell["length"] for cell in cells):
            for limit, names in ((1.1, ("none", "rope", "alibi", "t5", "forget_gate")), (1.25, ("self_extend",))):
                whom = f"{', '.join(names)}, over stock"
                yield _ratio(content, whom, limit, "smollm2", phase, length, names=names, over="to_stock")


def _on_cuda(content: dict[str, Any]) -> Iterator[Verdict]:
    """Schemes at their model's own back-end (sdpa), and those that are to be cheaper than no position on any."""
    for length in (4096, _LONG):
        for level in ("attention", "smollm2"):
            for phase in ("forward", "train"):
                cell: tuple[str, str, int] = (level, phase, length)
                yield _ratio(content, "distance biases", 1.05, *cell, families=("distance bias",))
                yield _ratio(content, "rotations", 1.05, *cell, families=("rotation",))
                for name in ("alibi", "forget_gate"):
                    for subject in (name, f"{name}@flex_attention"):
                        yield _ratio(content, subject, 1.0, *cell, names=(subject,))
                yield _ratio(content, "rope, over stock RoPE", 1.0, *cell, names=("rope",), over="to_stock")
        for phase in ("decode", "decode_batch16"):
            families = ("distance bias", "rotation")
            yield _ratio(content, "distance biases and rotations", 1.05, "smollm2", phase, length, families=families)


def _ratio(
    content: dict[str, Any],
    whom: str,
    limit: float,
    level: str,
    phase: str,
    length: int,
    *,
    families: tuple[str, ...] | None = None,
    names: tuple[str, ...] | None = None,
    over: str = "to_bare",
) -> Verdict:
    target = f"{whom}: at most {limit:g}, {_LEVELS[level]}, {(_PHASES | _BATCHED)[phase]}, T = {length}"
    cell = content["cells"].get(f"{level} {phase} {length}", {})
    if level == SMOLLM2_LEVEL and not has_smollm2_shape(content["settings"]):
        cell = {}
    rows = [
        row
        for row in cell.get("rows", ())
        if row["family"] not in ("bare", "stock", "peer")
        and (families is None or row["family"] in families)
        and (names is None or row["subject"] in names)
        and over in row
    ]
    if not rows:
        return Verdict(target, f"{level} {phase} {length}", None)
    worst = max(rows, key=lambda row: row[over]["median"])
    found = worst[over]
    kept = sum(row[over]["median"] <= limit for row in rows)
    many = f", {kept} of {len(rows)} keep it; worst" if len(rows) > 1 else ""
    figure = f"{found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"
    named = f"{many} {worst['subject']} {figure}".lstrip(", ")
    return Verdict(target, named, kept == len(rows))


def _memory(content: dict[str, Any], whom: str, limit: float, phase: str, length: int) -> Verdict:
    target = f"{whom}: peak memory at most {limit:g}, a small Llama, {_PHASES[phase]}, T = {length}"
    entries = [
        one
        for one in content["memory"].values()
        if (one["level"], one["phase"], one["length"]) == ("model", phase, length) and "phase_bytes" in one
    ]
    bare = next((one for one in entries if one["subject"] == BARE), None)
    biases = _distance_biases(content)
    found = {one["subject"]: one["phase_bytes"] for one in entries if one["subject"] in biases}
    if bare is None or not found:
        return Verdict(target, f"memory of model {phase} {length}", None)
    worst = max(found, key=lambda name: found[name])
    ratio = found[worst] / bare["phase_bytes"]
    return Verdict(target, f"worst {worst} {ratio:.3f}", ratio <= limit)


def _distance_biases(content: dict[str, Any]) -> set[str]:
    return {
        row["subject"] for cell in content["cells"].values() for row in cell["rows"] if row["family"] == "distance bias"
    } | {"alibi", "t5"}


def _runs_long(content: dict[str, Any]) -> Verdict:
    target = f"distance biases run a training step of {_LONG} tokens where the bare model does"
    entries = {
        one["subject"]: one
        for one in content["memory"].values()
        if (one["level"], one["phase"], one["length"]) == ("model", "train", _LONG)
    }
    found = {name: entries[name] for name in sorted(_distance_biases(content) & set(entries))}
    if BARE not in entries or not found:
        return Verdict(target, f"memory of model train {_LONG}", None)
    told = [f"{name} {_gigabytes(one)}" for name, one in {BARE: entries[BARE], **found}.items()]
    ran = all("phase_bytes" in one for one in found.values()) or "phase_bytes" not in entries[BARE]
    return Verdict(target, ", ".join(told), ran)


def _gigabytes(entry: dict[str, Any]) -> str:
    return f"{entry['total_bytes'] / 1e9:.2f} GB" if "total_bytes" in entry else "did not run"
