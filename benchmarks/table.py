"""Writes `table.md`: targets, ratios by level and phase, peers, peak memory, and skipped subjects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from benchmarks.levels import LEVELS, SMOLLM2_LEVEL, has_smollm2_shape
from benchmarks.lineup import CONTROL
from benchmarks.machine import machine_line, subnormal_line
from benchmarks.subjects import BARE, STOCK
from benchmarks.targets import verdicts
from benchmarks.timing import spread
from hf_posenc.report import Quantity, Record, Result, Subject, View
from hf_posenc.report.tables import format_table

_PHASES = {
    "forward": "forward",
    "train": "forward and backward",
    "decode": "one token after a cache of T",
    "train_compiled": "forward and backward, compiled",
    "decode_compiled": "one token after a static cache of T, compiled",
    "decode_batch16": "a token for each of 16 sequences after a cache of T",
}
#: By quantity: the heading and style of its columns, and the addition to level and phase in the titles of its tables.
_QUANTITIES = {
    "to_bare": ("T = {T}", "number", ", over bare"),
    "to_stock": ("T = {T}", "number", ", over stock"),
    "peer": ("T = {T}", "number", ", other ways and other libraries, over bare"),
    "peer_own": ("T = {T}, over its own code without position", "number", ""),
    "milliseconds": ("ms, T = {T}", "loss", ", milliseconds"),
    "rounds": ("rounds, T = {T}", "number", ""),
    "peak_bytes": ("T = {T}", "count", ", peak of the GPU's memory above what was held before, in MB"),
    "peak_over_bare": ("over bare, T = {T}", "fraction", ""),
    "phase_bytes": ("peak of the call in MB, T = {T}", "count", ", peak memory of a process of its own"),
    "phase_over_bare": ("over bare, T = {T}", "fraction", ""),
    "total_over_bare": ("whole process over bare, T = {T}", "fraction", ""),
    "seconds": ("seconds of this one call, T = {T}", "number", ""),
}
_TABLES = (
    ("milliseconds", "rounds"), ("to_bare",), ("to_stock",), ("peer", "peer_own"), ("peak_bytes", "peak_over_bare"),
    ("phase_bytes", "phase_over_bare", "total_over_bare", "seconds"),
)  # fmt: skip
#: On an idle machine, the control differs from 1 by at most this.
_QUIET = 0.03


def write_tables(content: dict[str, Any]) -> str:
    """Returns the text of `table.md`."""
    settings = content["settings"]
    shapes = [f"{name} {settings[name]}" for name in ("sizes", SMOLLM2_LEVEL) if name in settings]
    measured = {cell["level"] for cell in content["cells"].values()}
    shapes += [
        f"{name} {asdict(level.sizes)}"
        for name, level in LEVELS.items()
        if name in measured and level.sizes is not None and name != SMOLLM2_LEVEL
    ]
    introduction = f"""# What position encoding costs

Times are relative to the same model without positions (`{BARE}`), measured side by side. In every round each subject
runs once, in random order. A number is the median over rounds of the ratio within a round, with the first and third
quartile in parentheses. `{CONTROL}` is a second copy of the bare model: its distance from 1 is the noise of this
machine. `{STOCK}` is the unpatched model with its own positions. An attention call is one layer without projections,
norms and feed-forward. The attention backend is sdpa unless `@` names another one. A row such as `alibi+forget_gate`
combines two schemes.

{machine_line(content["machine"])}; {settings["dtype"]}, batch 1 where no other is named.

Models with random weights: `{"; ".join(shapes)}`."""
    subnormals = subnormal_line(content["subnormals"]) if "subnormals" in content else ""
    commands = "```bash\n" + "\n".join(content["commands"]) + "\n```"
    return "\n\n".join(part for part in (introduction, subnormals, commands, *figure_tables(content)) if part) + "\n"


def figure_tables(content: dict[str, Any]) -> list[str]:
    """Returns everything after the introduction. Parts may be empty."""
    result = price_result(content)
    tables = [
        f"## {view.title}\n\n" + replace(result, views=(replace(view, title=""),)).table(markdown=True)
        for view in result.views
    ]
    return [_noise(content), _targets(content), *tables, _left_out(content)]


def price_result(content: dict[str, Any]) -> Result:
    """Returns every figure of a run as a record. Its `at` has level, phase, length `T` and the kind of its subject."""
    records = sorted([*_times(content), *_peaks(content)], key=lambda record: record.at["T"])
    measured = {(figure.quantity, figure.at["level"], figure.at["phase"]) for figure in records}
    titles = {name: level.title for name, level in LEVELS.items()}
    titles |= {} if has_smollm2_shape(content["settings"]) else {SMOLLM2_LEVEL: "A tiny Llama"}
    views = [
        View(
            names,
            f"{title}, {_PHASES[phase]}{_QUANTITIES[names[0]][2]}",
            rows=("kind",) if names == ("to_bare",) else (),
            shown={"level": (level,), "phase": (phase,)},
            order=names[0],
        )
        for level, title in titles.items()
        for phase in _PHASES
        for names in _TABLES
        if (names[0], level, phase) in measured
    ]
    return Result(
        task="price",
        title="",
        quantities=tuple(Quantity(name, heading, style=style) for name, (heading, style, _) in _QUANTITIES.items()),
        subjects=tuple(
            Subject(name, name.partition("@")[0].partition(":")[0])
            for name in dict.fromkeys(figure.subject for figure in records)
        ),
        records=tuple(records),
        views=tuple(views),
        settings={name: content[name] for name in ("machine", "settings", "commands") if name in content},
    )


def _times(content: dict[str, Any]) -> Iterator[Record]:
    for cell in content["cells"].values():
        held = {row["subject"]: row.get("peak_bytes") for row in cell["rows"]}
        for row in cell["rows"]:
            name, at = row["subject"], {"level": cell["level"], "phase": cell["phase"], "T": cell["length"]}
            at["kind"] = row["family"]
            if row["family"] == "peer":
                if "to_bare" in row:
                    yield Record(name, "peer", row["to_bare"]["median"], at)
                if row["baseline"] != name:
                    yield Record(name, "peer_own", row["ratio"]["median"], at)
            else:
                # All levels are compared with bare, but only some of them with stock.
                others = ("to_bare", "to_stock") if LEVELS[cell["level"]].to_stock else ("to_bare",)
                for over in others:
                    if over in row and name != over.removeprefix("to_"):
                        yield Record(name, over, row[over]["median"], at, shown=spread(row[over]), details=row[over])
            if name in (BARE, STOCK):
                yield Record(name, "milliseconds", row["milliseconds"], at)
                yield Record(name, "rounds", cell["rounds"], at)
            if "peak_bytes" in row and name != CONTROL:
                yield Record(name, "peak_bytes", row["peak_bytes"] / 1e6, at)
                if held.get(BARE):
                    yield Record(name, "peak_over_bare", row["peak_bytes"] / held[BARE], at)


def _peaks(content: dict[str, Any]) -> Iterator[Record]:
    """Yields peaks of whole processes, if the bare model also has one."""
    measured = [peak for peak in content["memory"].values() if "phase_bytes" in peak]
    bare = {(peak["level"], peak["phase"], peak["length"]): peak for peak in measured if peak["subject"] == BARE}
    for peak in measured:
        floor = bare.get((peak["level"], peak["phase"], peak["length"]))
        if floor is not None:
            at = {"level": peak["level"], "phase": peak["phase"], "T": peak["length"]}
            yield Record(peak["subject"], "phase_bytes", peak["phase_bytes"] / 1e6, at)
            for kind in ("phase", "total"):
                yield Record(peak["subject"], f"{kind}_over_bare", peak[f"{kind}_bytes"] / floor[f"{kind}_bytes"], at)
            yield Record(peak["subject"], "seconds", peak["seconds"], at)


def _noise(content: dict[str, Any]) -> str:
    """Describes the noise that the control shows."""
    controls = [
        (abs(row["to_bare"]["median"] - 1), row["to_bare"]["median"], key)
        for key, cell in content["cells"].items()
        for row in cell["rows"]
        if row["subject"] == CONTROL
    ]
    if not controls:
        return ""
    distance, ratio, key = max(controls)
    text = f"The second bare model was furthest from 1 in `{key}`: {ratio:.3f}."
    return text + "\n**The machine was not idle: smaller differences are noise here.**" * (distance > _QUIET)


def _targets(content: dict[str, Any]) -> str:
    """Returns the measured targets."""
    rows = [(target, measured, "yes" if met else "**no**") for target, measured, met in verdicts(content)]
    return "## Targets\n\n" + format_table(("target", "measured", "met"), rows, form="markdown") if rows else ""


def _left_out(content: dict[str, Any]) -> str:
    """Returns one line per subject and reason, with the cells in which it is missing."""
    places: dict[str, list[str]] = {}
    for key, cell in content["cells"].items():
        for name, reason in cell["left_out"].items():
            places.setdefault(f"- `{name}`: {reason}", []).append(key)
    for key, peak in content["memory"].items():
        if "reason" in peak:
            places.setdefault(f"- `{peak['subject']}`: {peak['reason']}", []).append(f"memory of {key}")
    lines = [f"{line} ({', '.join(keys)})" for line, keys in places.items()]
    lines += [f"- {key}: not started within the time budget" for key in content.get("not_begun", ())]
    return "## Left out\n\n" + "\n".join(lines) if lines else ""
