"""`table.md`: targets, ratios by level and phase, peers, peak memory, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.lineup import BARE, CONTROL, SMOLLM2_LEVEL, STOCK
from benchmarks.subjects import has_smollm2_shape
from benchmarks.subnormals import subnormal_line
from benchmarks.targets import verdicts
from hf_posenc.report import Quantity, Record, Result, Subject, View
from hf_posenc.report.rendering import table_cells
from hf_posenc.report.tables import markdown_table

_SMOLLM2 = "The shape of SmolLM2-135M"
_BATCH = "a token for each of 16 sequences behind a cache of T"
_TITLES = {
    ("attention", "forward"): "One attention call, forward",
    ("attention", "train"): "One attention call, forward and backward",
    ("model", "forward"): "A small Llama, forward",
    ("model", "train"): "A small Llama, training step",
    ("model", "decode"): "A small Llama, one token behind a cache of T",
    ("model", "decode_batch16"): f"A small Llama, {_BATCH}",
    ("smollm2", "forward"): f"{_SMOLLM2}, forward",
    ("smollm2", "train"): f"{_SMOLLM2}, training step",
    ("smollm2", "decode"): f"{_SMOLLM2}, one token behind a cache of T",
    ("smollm2", "decode_batch16"): f"{_SMOLLM2}, {_BATCH}",
    ("encoder", "forward"): "A small BERT, forward",
    ("encoder", "train"): "A small BERT, training step",
}
_QUANTITIES = (
    *(Quantity(name, "T = {T}") for name in ("to_bare", "to_stock", "peer", "milliseconds", "peak_bytes")),
    Quantity("rounds", "rounds, T = {T}"),
    Quantity("phase_bytes", "peak of the call, T = {T}"),
    Quantity("phase_over_bare", "over bare, T = {T}"),
    Quantity("total_over_bare", "whole process over bare, T = {T}"),
)
_MEMORY = ("phase_bytes", "phase_over_bare", "total_over_bare")
_MOST_NAMES = 6
#: The control of a machine that does nothing else stays this near to 1.
_QUIET = 0.03


def write_tables(content: dict[str, Any]) -> str:
    """The text of `table.md`.

    Args:
        content: of `results.json`.
    """
    return "\n\n".join(part for part in (_introduction(content), *figure_tables(content)) if part) + "\n"


def price_result(content: dict[str, Any]) -> Result:
    """Every figure of a run as a record: `at` are its level, its phase and the length `T`, and the kind of its subject.

    Args:
        content: of `results.json`.
    """
    records = sorted([*_times(content), *_peaks(content)], key=lambda record: record.at["T"])
    return Result(
        task="price",
        title="",
        quantities=_QUANTITIES,
        subjects=tuple(Subject(name, name.partition("@")[0]) for name in dict.fromkeys(one.subject for one in records)),
        records=tuple(records),
        views=(),
        settings={name: content[name] for name in ("machine", "settings", "commands") if name in content},
    )


def _times(content: dict[str, Any]) -> Iterator[Record]:
    for cell in content["cells"].values():
        for row in cell["rows"]:
            at = {"level": cell["level"], "phase": cell["phase"], "T": cell["length"], "kind": row["family"]}
            name, peer = row["subject"], row["family"] == "peer"
            for over in () if peer else ("to_bare", "to_stock"):
                if over in row and name != over.removeprefix("to_"):
                    found = row[over]
                    spread = f"{found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"
                    yield Record(name, over, found["median"], at, found["low"], found["high"], shown=spread)
            if peer and "to_bare" in row:
                own = row["baseline"]
                inner = "" if own == name else f" ({row['ratio']['median']:.3g})"
                without = at | {"without position it is": "" if own == name else own}
                median = row["to_bare"]["median"]
                yield Record(name, "peer", median, without, shown=f"{median:.3g}{inner}")
            if name in (BARE, STOCK):
                yield Record(name, "milliseconds", row["milliseconds"], at, shown=f"{row['milliseconds']:.4g} ms")
                yield Record(name, "rounds", cell["rounds"], at, shown=str(cell["rounds"]))
            if "peak_bytes" in row and name != CONTROL:
                bare = next((one.get("peak_bytes") for one in cell["rows"] if one["subject"] == BARE), None)
                over = f" ({row['peak_bytes'] / bare:.3f})" if bare else ""
                yield Record(name, "peak_bytes", row["peak_bytes"], at, shown=f"{row['peak_bytes'] / 1e6:.0f} MB{over}")


def _peaks(content: dict[str, Any]) -> Iterator[Record]:
    """Peaks of whole processes, where the bare model has one too."""
    measured = [one for one in content["memory"].values() if "phase_bytes" in one]
    bare = {(one["level"], one["phase"], one["length"]): one for one in measured if one["subject"] == BARE}
    for one in measured:
        floor = bare.get((one["level"], one["phase"], one["length"]))
        if floor is not None:
            at = {"level": one["level"], "phase": one["phase"], "T": one["length"]}
            ratios = [one[name] / floor[name] for name in ("phase_bytes", "total_bytes")]
            figures = (one["phase_bytes"], *ratios)
            shown = (f"{one['phase_bytes'] / 1e6:.0f} MB", *(f"{ratio:.3f}" for ratio in ratios))
            for name, value, text in zip(_MEMORY, figures, shown, strict=True):
                yield Record(one["subject"], name, value, at, shown=text)


def figure_tables(content: dict[str, Any]) -> list[str]:
    """Everything behind the introduction, part by part; some may be empty.

    Args:
        content: of `results.json`.
    """
    result = price_result(content)
    parts = [_noise(content), _targets(content), _units(result)]
    for level, phase in _TITLES:
        title = _title(content, level, phase)
        parts.append(_section(result, "## " + title, ("to_bare",), level, phase, rows=("kind",)))
        if level == SMOLLM2_LEVEL:
            parts.append(_section(result, "### Over stock", ("to_stock",), level, phase, rows=("kind",)))
        explained = "### Other ways and other libraries\n\nTime over the bare call; in parentheses, over the same code "
        explained += "without position."
        parts.append(_section(result, explained, ("peer",), level, phase, rows=("without position it is",)))
    gpu = "How far the peak of the GPU's memory rose above what was held before, and in parentheses over bare."
    alone = "Each in a process of its own: how far its peak rose above what it held before the call."
    for heading, explained, quantities in (
        ("## Peak memory on the GPU", gpu, ("peak_bytes",)),
        ("## Peak memory", alone, _MEMORY),
    ):
        tables = [
            _section(result, "### " + _title(content, level, phase), quantities, level, phase)
            for level, phase in _TITLES
        ]
        parts += [heading, explained, *tables] if any(tables) else []
    return [*parts, _left_out(content)]


def _section(
    result: Result, heading: str, quantities: tuple[str, ...], level: str, phase: str, rows: tuple[str, ...] = ()
) -> str:
    """A heading and the table of one level and phase, the cheapest at the longest length first."""
    found = [
        one
        for one in result.records
        if one.quantity in quantities and (one.at["level"], one.at["phase"]) == (level, phase)
    ]
    if not found:
        return ""
    return f"{heading}\n\n" + _rendered(result, found, View(quantities, rows=rows, order=quantities[0]))


def _units(result: Result) -> str:
    """How long the models take that the others are measured against."""
    found = [one for one in result.records if one.quantity in ("milliseconds", "rounds")]
    if not found:
        return ""
    view = View(("milliseconds", "rounds"), rows=("level", "phase"))
    heading = "## What 1.00 is\n\nMilliseconds of the bare and the stock model, and how many rounds were measured."
    return f"{heading}\n\n{_rendered(result, found, view)}"


def _rendered(result: Result, records: list[Record], view: View) -> str:
    # The spread of a ratio stands in its cell.
    plain = [replace(one, subject=f"`{one.subject}`", low=None, high=None) for one in records]
    subjects = tuple(Subject(name, name) for name in dict.fromkeys(one.subject for one in plain))
    ((cells,), _) = table_cells(Result("price", "", result.quantities, subjects, tuple(plain), (view,)))
    return markdown_table(*cells)


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
    parts = [markdown_table(("target", "measured", "met"), rows)] if rows else []
    if missing:
        cells = list(dict.fromkeys(missing))
        named = ", ".join(f"`{cell}`" for cell in cells[:_MOST_NAMES])
        more = f" and {len(cells) - _MOST_NAMES} more" if len(cells) > _MOST_NAMES else ""
        parts.append(f"Not judged, because nothing was measured for them: {len(missing)} targets ({named}{more}).")
    return "\n\n".join(["## Targets", *parts]) if parts else ""


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
