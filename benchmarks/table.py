"""`table.md`: targets, ratios by level and phase, peers, peak memory, and what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.lineup import BARE, CONTROL, SMOLLM2_LEVEL, STOCK
from benchmarks.subjects import has_smollm2_shape
from benchmarks.subnormals import subnormal_line
from benchmarks.targets import verdicts

_SMOLLM2 = "The shape of SmolLM2-135M"
_TITLES = {
    ("attention", "forward"): "One attention call, forward",
    ("attention", "train"): "One attention call, forward and backward",
    ("model", "forward"): "A small Llama, forward",
    ("model", "train"): "A small Llama, training step",
    ("model", "decode"): "A small Llama, one token behind a cache of T",
    ("model", "decode_batch16"): "A small Llama, a token for each of 16 sequences behind a cache of T",
    ("smollm2", "forward"): f"{_SMOLLM2}, forward",
    ("smollm2", "train"): f"{_SMOLLM2}, training step",
    ("smollm2", "decode"): f"{_SMOLLM2}, one token behind a cache of T",
    ("smollm2", "decode_batch16"): f"{_SMOLLM2}, a token for each of 16 sequences behind a cache of T",
    ("encoder", "forward"): "A small BERT, forward",
    ("encoder", "train"): "A small BERT, training step",
}


_MOST_NAMES = 6
#: The control of a machine that does nothing else stays this near to 1.
_QUIET = 0.03


def write_tables(content: dict[str, Any]) -> str:
    """The text of `table.md`.

    Args:
        content: of `results.json`.
    """
    parts = [_introduction(content), *figure_tables(content)]
    return "\n\n".join(part for part in parts if part) + "\n"


def figure_tables(content: dict[str, Any]) -> list[str]:
    """Everything behind the introduction, part by part; some may be empty.

    Args:
        content: of `results.json`.
    """
    parts = [_noise(content), _targets(content)]
    for level, phase in _TITLES:
        cells = _cells(content, level, phase)
        if any(cell["rows"] for cell in cells):
            parts.append(f"## {_title(content, level, phase)}\n\n{_ratios(cells)}")
            if level == SMOLLM2_LEVEL:
                parts.append(f"### Over stock\n\n{_ratios(cells, STOCK)}")
            if level == "attention" and any(row["family"] == "peer" for cell in cells for row in cell["rows"]):
                parts.append(f"### Other ways and other libraries\n\n{_peers(cells)}")
    return [*parts, _peaks(content), _memory(content), _left_out(content)]


def _title(content: dict[str, Any], level: str, phase: str) -> str:
    """Of a table; models that are smaller than SmolLM2-135M do not have its name."""
    title = _TITLES[level, phase]
    if level != SMOLLM2_LEVEL or has_smollm2_shape(content["settings"]):
        return title
    sizes = content["settings"][SMOLLM2_LEVEL]
    return title.replace(_SMOLLM2, f"A Llama with {sizes['num_layers']} layers of width {sizes['hidden_size']}")


def _introduction(content: dict[str, Any]) -> str:
    machine, settings = content["machine"], content["settings"]
    shape = _shape(settings["sizes"])
    if any(cell["level"] == SMOLLM2_LEVEL for cell in content["cells"].values()):
        named = "those of the shape of SmolLM2-135M" if has_smollm2_shape(settings) else "those at the level smollm2"
        shape += f";\n{named}: {_shape(settings[SMOLLM2_LEVEL])}"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    library = f"hf-posenc {machine['hf-posenc']} (source\n`{machine['hf-posenc source']}`)"
    commands = "\n".join(content["commands"])
    return f"""# What position encoding costs

Time over that of the same model with no position at all (`bare`), measured side by side. In every round each subject
runs once, in random order. A figure is the median over rounds of the ratio within a round, with the first and third
quartile in parentheses. `{CONTROL}` is a second copy of the bare model: its distance from 1 is the noise of this
machine. `stock` is the unpatched model with its own positions.

{place(machine)}; {versions}, {library}; {settings["dtype"]}, batch 1 where no other is named.
Models with random weights: {shape};
attention is sdpa. An attention call is one layer without projections, norms and feed-forward. Arrangements of schemes
have no row: they cost what the schemes in them cost.{_subnormals(content)}

```bash
{commands}
```"""


def _shape(sizes: dict[str, Any]) -> str:
    groups = sizes.get("num_key_value_heads")
    heads = f"{sizes['num_heads']} heads" + (f" ({groups} of keys and values)" if groups else "")
    return (
        f"{sizes['num_layers']} layers, hidden {sizes['hidden_size']}, {heads}, feed-forward "
        f"{sizes['intermediate_size']}, vocabulary {sizes['vocab_size']}"
    )


def place(machine: dict[str, Any]) -> str:
    """The processor, and the GPU where there is one."""
    processor = f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    return f"{machine['gpu']} (CUDA {machine['cuda']}) beside {processor}" if "gpu" in machine else processor


def _subnormals(content: dict[str, Any]) -> str:
    return f"\n\n{subnormal_line(content['subnormals'])}" if "subnormals" in content else ""


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
        text += "\n**The machine was not quiet: smaller differences mean nothing here.**"
    return text


def _targets(content: dict[str, Any]) -> str:
    """What was judged, and one line on the rest."""
    found = verdicts(content)
    rows = [(one.target, one.measured, "yes" if one.met else "**no**") for one in found if one.met is not None]
    missing = [one.measured for one in found if one.met is None]
    parts = [_table(("target", "measured", "met"), rows)] if rows else []
    if missing:
        cells = list(dict.fromkeys(missing))
        named = ", ".join(f"`{cell}`" for cell in cells[:_MOST_NAMES])
        more = f" and {len(cells) - _MOST_NAMES} more" if len(cells) > _MOST_NAMES else ""
        parts.append(f"Not judged, because nothing was measured for them: {len(missing)} targets ({named}{more}).")
    return "\n\n".join(["## Targets", *parts]) if parts else ""


def _ratios(cells: list[dict[str, Any]], over: str = BARE) -> str:
    """One row per scheme, the cheapest at the longest length first."""
    kind = f"to_{over}"
    lengths = [cell["length"] for cell in cells]
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    families: dict[str, str] = {}
    for cell in cells:
        for row in cell["rows"]:
            if row["family"] != "peer":
                by_name.setdefault(row["subject"], {})[cell["length"]] = row
                families[row["subject"]] = row["family"]
    one = by_name.pop(over, {})
    figured = {name for name in by_name if any(kind in row for row in by_name[name].values())}
    order = sorted(figured, key=lambda name: _cost(by_name[name], kind))
    rows = [
        (f"`{name}`", families[name], *(_spread(by_name[name].get(length), kind) for length in lengths))
        for name in order
    ]
    unit = [f"{one[length]['milliseconds']:.4g} ms" if length in one else "-" for length in lengths]
    rounds = [str(cell["rounds"]) for cell in cells]
    head = ("scheme", "kind", *(f"T = {length}" for length in lengths))
    return _table(head, [(f"`{over}`", "1.00 =", *unit), *rows, ("rounds", "", *rounds)])


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


def _peaks(content: dict[str, Any]) -> str:
    """What a GPU counted while the calls above ran."""
    parts = []
    for level, phase in _TITLES:
        cells = [cell for cell in _cells(content, level, phase) if any("peak_bytes" in row for row in cell["rows"])]
        if not cells:
            continue
        by_cell = [{row["subject"]: row["peak_bytes"] for row in cell["rows"] if "peak_bytes" in row} for cell in cells]
        names = dict.fromkeys(name for peaks in by_cell for name in peaks)
        rows = [(f"`{name}`", *(_peak(peaks, name) for peaks in by_cell)) for name in names if name != CONTROL]
        title = _title(content, level, phase)
        parts.append(f"### {title}\n\n" + _table(("scheme", *(f"T = {cell['length']}" for cell in cells)), rows))
    explained = "How far the peak of the GPU's memory rose above what was held before, and in parentheses over bare."
    return "\n\n".join(["## Peak memory on the GPU", explained, *parts]) if parts else ""


def _peak(peaks: dict[str, int], name: str) -> str:
    if name not in peaks:
        return "-"
    over = f" ({peaks[name] / peaks[BARE]:.3f})" if peaks.get(BARE) else ""
    return f"{peaks[name] / 1e6:.0f} MB{over}"


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
        title = f"### {_title(content, level, phase)}, T = {length}"
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
    return rows[max(length for length, row in rows.items() if over in row)][over]["median"]


def _spread(row: dict[str, Any] | None, over: str) -> str:
    if row is None or over not in row:
        return "-"
    found = row[over]
    return f"{found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
