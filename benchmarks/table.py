"""`table.md`: targets, ratios by level and phase, peers, peak memory, and what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.lineup import BARE, CONTROL
from benchmarks.targets import verdicts

_TITLES = {
    ("attention", "forward"): "One attention call, forward",
    ("attention", "train"): "One attention call, forward and backward",
    ("model", "forward"): "A small Llama, forward",
    ("model", "train"): "A small Llama, training step",
    ("model", "decode"): "A small Llama, one token behind a cache of T",
    ("encoder", "forward"): "A small BERT, forward",
    ("encoder", "train"): "A small BERT, training step",
}


#: The control of a machine that does nothing else stays this near to 1.
_QUIET = 0.03


def write_tables(content: dict[str, Any]) -> str:
    """The text of `table.md`.

    Args:
        content: of `results.json`.
    """
    parts = [_introduction(content), _noise(content), _targets(content)]
    for (level, phase), title in _TITLES.items():
        cells = _cells(content, level, phase)
        if any(cell["rows"] for cell in cells):
            parts.append(f"## {title}\n\n{_ratios(cells)}")
            if level == "attention" and any(row["family"] == "peer" for cell in cells for row in cell["rows"]):
                parts.append(f"### Other ways and other libraries\n\n{_peers(cells)}")
    parts += [_memory(content), _left_out(content)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(content: dict[str, Any]) -> str:
    machine, settings = content["machine"], content["settings"]
    sizes = settings["sizes"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    shape = (
        f"{sizes['num_layers']} layers, hidden {sizes['hidden_size']}, {sizes['num_heads']} heads, feed-forward "
        f"{sizes['intermediate_size']}, vocabulary {sizes['vocab_size']}"
    )
    commands = "\n".join(content["commands"])
    return f"""# What position encoding costs

Time over that of the same model with no position at all (`bare`), measured side by side: in every round each subject
runs once, in a drawn order; a figure is the median over rounds of the ratio within a round, in parentheses the first
and third quartile. `{CONTROL}` is a second copy of the bare model: what it differs from 1 is what this machine cannot
tell apart. `stock` is the unpatched model with its own positions.

{where}; torch {machine["torch"]}, transformers {machine["transformers"]}, hf-posenc {machine["hf-posenc"]} (source
`{machine["hf-posenc source"]}`); {settings["dtype"]}, batch {settings["batch_size"]}.
Models with random weights: {shape};
attention is sdpa. An attention call is one layer without projections, norms and feed-forward. Arrangements of schemes
have no row: they cost what the schemes in them cost.

```bash
{commands}
```"""


def _noise(content: dict[str, Any]) -> str:
    """What the control shows."""
    found = [
        (abs(row["to_bare"]["median"] - 1), row["to_bare"]["median"], key)
        for key, cell in content["cells"].items()
        for row in cell["rows"]
        if row["subject"] == CONTROL
    ]
    if not found:
        return ""
    distance, ratio, key = max(found)
    text = f"The second bare model was furthest from 1 in `{key}`: {ratio:.3f}."
    if distance > _QUIET:
        text += "\n**That is not a quiet machine: differences of that size mean nothing here.**"
    return text


def _targets(content: dict[str, Any]) -> str:
    words = {True: "yes", False: "**no**", None: "-"}
    rows = [(one.target, one.measured, words[one.met]) for one in verdicts(content)]
    return "## Targets\n\n" + _table(("target", "measured", "met"), rows)


def _ratios(cells: list[dict[str, Any]]) -> str:
    """One row per scheme, the cheapest at the longest length first."""
    lengths = [cell["length"] for cell in cells]
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    families: dict[str, str] = {}
    for cell in cells:
        for row in cell["rows"]:
            if row["family"] != "peer":
                by_name.setdefault(row["subject"], {})[cell["length"]] = row
                families[row["subject"]] = row["family"]
    order = sorted(by_name, key=lambda name: _cost(by_name[name], "to_bare"))
    rows = [
        (f"`{name}`", families[name], *(_spread(by_name[name].get(length), "to_bare") for length in lengths))
        for name in order
        if name != BARE
    ]
    bare = [f"{by_name[BARE][length]['milliseconds']:.4g} ms" if length in by_name[BARE] else "-" for length in lengths]
    rounds = [str(cell["rounds"]) for cell in cells]
    head = ("scheme", "kind", *(f"T = {length}" for length in lengths))
    return _table(head, [("`bare`", "1 is", *bare), *rows, ("rounds", "", *rounds)])


def _peers(cells: list[dict[str, Any]]) -> str:
    lengths = [cell["length"] for cell in cells]
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in cells:
        for row in cell["rows"]:
            if row["family"] == "peer":
                by_name.setdefault(row["subject"], {})[cell["length"]] = row
    rows = []
    for name in sorted(by_name, key=lambda name: _cost(by_name[name], "to_bare")):
        found = by_name[name]
        own = next(iter(found.values()))["baseline"]
        figures = []
        for length in lengths:
            row = found.get(length)
            inner = "" if row is None or own == name else f" ({row['ratio']['median']:.3g})"
            figures.append("-" if row is None else f"{row['to_bare']['median']:.3g}{inner}")
        rows.append((name, "" if own == name else own, *figures))
    explained = "Time over the bare call; in parentheses, over the same code without position.\n\n"
    return explained + _table(("way", "without position it is", *(f"T = {length}" for length in lengths)), rows)


def _memory(content: dict[str, Any]) -> str:
    groups: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for one in content["memory"].values():
        groups.setdefault((one["level"], one["phase"], one["length"]), {})[one["subject"]] = one
    parts = []
    for (level, phase, length), entries in groups.items():
        if "phase_bytes" not in entries.get(BARE, {}):
            continue
        bare = entries[BARE]
        rows = [
            (
                f"`{name}`",
                f"{one['phase_bytes'] / 1e6:.0f} MB",
                f"{one['phase_bytes'] / bare['phase_bytes']:.3f}",
                f"{one['total_bytes'] / bare['total_bytes']:.3f}",
            )
            for name, one in sorted(entries.items(), key=lambda item: item[1].get("phase_bytes", 0))
            if "phase_bytes" in one
        ]
        title = f"### {_TITLES[level, phase]}, T = {length}"
        parts.append(
            f"{title}\n\n" + _table(("scheme", "peak of the call", "over bare", "whole process over bare"), rows)
        )
    if not parts:
        return ""
    explained = "Each in a process of its own: how far its peak rose above what it held before the call."
    return "\n\n".join(["## Peak memory", explained, *parts])


def _left_out(content: dict[str, Any]) -> str:
    """One line per subject and reason, with the cells that lack it."""
    places: dict[tuple[str, str], list[str]] = {}
    for key, cell in content["cells"].items():
        for name, reason in cell["left_out"].items():
            places.setdefault((name, reason), []).append(key)
    for key, one in content["memory"].items():
        if "reason" in one:
            places.setdefault((one["subject"], one["reason"]), []).append(f"memory of {key}")
    lines = [f"- `{name}`: {reason} ({', '.join(keys)})" for (name, reason), keys in places.items()]
    lines += [f"- {key}: not begun within the budget" for key in content.get("not_begun", ())]
    return "## Left out\n\n" + "\n".join(lines) if lines else ""


def _cells(content: dict[str, Any], level: str, phase: str) -> list[dict[str, Any]]:
    found = [cell for cell in content["cells"].values() if (cell["level"], cell["phase"]) == (level, phase)]
    return sorted((cell for cell in found if cell["rows"]), key=lambda cell: cell["length"])


def _cost(rows: dict[int, dict[str, Any]], over: str) -> float:
    return rows[max(rows)][over]["median"]


def _spread(row: dict[str, Any] | None, over: str) -> str:
    if row is None:
        return "-"
    found = row[over]
    return f"{found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
