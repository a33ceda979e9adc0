"""The page of architectures, from the findings of a sweep."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import transformers

from hf_posenc.report.tables import markdown_table
from tests.architectures.checks import SCHEMES
from tests.architectures.findings import NATIVE_BOUND, SAME_BOUND
from tests.architectures.part_schemes import GRID_SCHEMES, SERIES_SCHEMES, TEXT_SCHEMES
from tests.architectures.population import KINDS, WITH_VOCABULARY_HEAD, aliases

#: `Record.to_dict` with the kind and the model type, or the pair and why its process died.
FoundRecord = dict[str, Any]

_COLUMNS = {"text": tuple(TEXT_SCHEMES), "vision": tuple(GRID_SCHEMES), "series": tuple(SERIES_SCHEMES)}
_PARTS = {
    "text": "Parts that read tokens, and what connects parts",
    "vision": "Parts that read pictures and videos",
    "series": "Parts that read sound and series",
}


def document(records: list[FoundRecord]) -> str:
    """The page."""
    tables = []
    for kind, title in KINDS.items():
        own = [record for record in records if record["kind"] == kind]
        if kind in WITH_VOCABULARY_HEAD:
            tables.append(f"## {title}\n\n{_table(own, SCHEMES)}")
        else:
            tables.append(f"## {title}\n\n{_tables_of_parts(own)}")
    refused = [(_name(record), record["refusal"]) for record in records if record.get("refusal")]
    without = [(record["pair"], record["without"]) for record in records if record.get("without")]
    unbuilt = [(record["pair"], record["unbuilt"]) for record in records if record.get("unbuilt")]
    return "\n\n".join(
        (
            _introduction(),
            _counts(records),
            _summary(records),
            *tables,
            "## Without softmax self-attention",
            markdown_table(("architecture", "what it has instead"), without),
            "## Not built",
            markdown_table(("architecture", "reason"), unbuilt),
            "## Refused\n\n`UnsupportedError` with every scheme; the model is left unchanged.",
            markdown_table(("architecture", "reason"), refused),
            "## Refused in part",
            "\n".join(listed(records, "refused") or ["Nothing."]),
            "## What fails",
            "\n".join(listed(records, "fail") or ["Nothing."]) + "\n",
        )
    )


def _introduction() -> str:
    return f"""# Architectures

<!-- Written by docs/generate/architectures.py. Edits are lost. -->

Written by `python docs/generate/architectures.py`, which builds a tiny random model (64 wide, 4 heads, window 8, every
gate open) of each architecture in transformers' auto mappings, and of variants that a default config hides, and runs
the checks in `tests/architectures` for each scheme in each part. Last run: transformers {transformers.__version__},
torch {torch.__version__.split("+")[0]}, float32 on a CPU.

A cell says `yes` if every check passes, `-` if the scheme is refused there with a reason (an `UnsupportedError` instead
of a wrong answer, listed under "Refused in part"), and `**no**` if a check fails:

- **native**: `patch_model(model, native_scheme(model))` gives the stock outputs to {NATIVE_BOUND:g} of their
  standard deviation, and those for pictures or sound of another size to {SAME_BOUND:g};
- **none**: the outputs differ from stock, do not depend on the order of tokens (last token of a one-layer causal model,
  or any bidirectional model; {SAME_BOUND:g}), and attention still depends on content. In a vision model with one token
  per patch, shuffled patches give the same tokens, shuffled; in a picture of one colour, some neighbours are equal;
- **every other scheme**: the outputs differ from stock and from `none`. In models of text they differ in every layer
  taken alone (`sinusoidal` acts before the layers), and depend on the order of tokens in one layer; in a vision model
  with one token per patch, shuffled patches give other tokens;
- all of them: eager attention gives the outputs of the default one ({SAME_BOUND:g}); `unpatch_model` gives bit-equal
  outputs and leaves no trace on weights, instances, classes, modules or the config;
- text and text parts: decoding with a cache (of the whole prompt, pictures and sound included) and left padding give
  the logits of the full, unpadded forward ({SAME_BOUND:g}), in models of text also with a static cache. What other
  parts compute is bit-equal when the text part is patched;
- parts that read pictures, sound and series: an input of another size runs.

Schemes: rope has theta 100, shaw a maximal distance of 4. Columns with `(grid)` and rope_nd read rows and columns (in
videos frames too), `rope (raster)` reads the patches in raster order. A check that the stock model fails too does not
count as a failure; the last column names it."""


def _counts(records: list[FoundRecord]) -> str:
    """How many architectures there are, and what became of them."""
    types: dict[str, list[FoundRecord]] = {}
    for record in records:
        types.setdefault(record["model_type"], []).append(record)
    state = Counter(_state(own) for own in types.values())
    without = Counter(own[0]["without"] for own in types.values() if _state(own) == "without")
    *most, last = [f"{count} {reason}" for reason, count in without.most_common()] or ["0"]
    instead = f"{', '.join(most)} and {last}" if most else last
    same = ", ".join(f"{name} ({owner})" for name, owner in sorted(aliases().items()))
    attending = len(types) - state["without"]
    lines = (
        f"transformers {transformers.__version__} has **{len(types)} architectures**: model types of its auto mappings "
        f"with a main class of their own. Other names of the same class are not counted: {same}.",
        f"{state['without']} of them have no softmax self-attention. What they have instead: {instead}.",
        f"Of the {attending} others, {state['works']} work: each scheme passes in every part, or is refused there with "
        f"a reason. {state['partly']} work with failures in some scheme or part, {state['refused']} are refused, "
        f"{state['fails']} fail with every scheme, and {state['unbuilt']} were not built here.",
    )
    return "## How many\n\n" + "\n\n".join(lines)


def _state(own: list[FoundRecord]) -> str:
    """What became of one architecture, over its heads, variants and parts."""
    for name in ("unbuilt", "without"):
        if all(record.get(name) for record in own):
            return name
    placed = [record for record in own if not record.get("refusal") and not record.get("without")]
    if not placed:
        return "refused"
    cells = [cell(record, scheme) for record in placed for scheme in record.get("findings", {}) if scheme != "native"]
    if "yes" not in cells:
        return "fails" if "**no**" in cells or not cells else "refused"
    return "works" if "**no**" not in cells else "partly"


def _summary(records: list[FoundRecord]) -> str:
    tables = []
    heads = [kind for kind in KINDS if kind in WITH_VOCABULARY_HEAD]
    rows = [_row(KINDS[kind], [one for one in records if one["kind"] == kind], SCHEMES) for kind in heads]
    rows.append(_row("all", [one for one in records if one["kind"] in heads], SCHEMES))
    tables.append(
        "### Models of text\n\n" + markdown_table(("kind", "rows", "refused", "with a scheme", *SCHEMES), rows)
    )
    parts = [one for one in records if one["kind"] not in heads and "findings" in one and one.get("part")]
    for columns, schemes in _COLUMNS.items():
        own = [record for record in parts if record["columns"] == columns]
        rows = [_row(KINDS[kind], [one for one in own if one["kind"] == kind], schemes) for kind in KINDS]
        rows = [row for row in rows if row[1] != "0"] + [_row("all", own, schemes)]
        header = ("kind", "parts", "refused", "with a scheme", *schemes)
        tables.append(f"### {_PARTS[columns]}\n\n{markdown_table(header, rows)}")
    return "## Summary\n\n" + "\n\n".join(tables)


def _row(title: str, records: list[FoundRecord], schemes: tuple[str, ...]) -> tuple[str, ...]:
    counted = [record for record in records if not record.get("without") and not record.get("unbuilt")]
    placed = [record for record in counted if not record.get("refusal")]
    cells = []
    for scheme in schemes:
        found = Counter(cell(record, scheme) for record in placed)
        refused = f", {found['-']} refused" if found["-"] else ""
        cells.append(f"{found['yes']} ({100 * found['yes'] / max(len(placed), 1):.1f} %){refused}")
    return title, str(len(counted)), str(len(counted) - len(placed)), str(len(placed)), *cells


def _tables_of_parts(records: list[FoundRecord]) -> str:
    tables = []
    for columns, schemes in _COLUMNS.items():
        own = [record for record in records if record.get("part") and record["columns"] == columns]
        if own:
            tables.append(f"### {_PARTS[columns]}\n\n{_table(own, schemes)}")
    return "\n\n".join(tables) or "None with softmax self-attention."


def _table(records: list[FoundRecord], schemes: tuple[str, ...]) -> str:
    rows = []
    for record in records:
        if record.get("refusal") or record.get("without") or record.get("unbuilt"):
            continue
        findings, native = record.get("findings", {}), record.get("native", "")
        limits = [name for name, one in findings.get("none", {}).items() if one["verdict"] == "stock"]
        named = "no name" if native.startswith("(") else native
        rows.append((_short(record), named, *(cell(record, one) for one in schemes), ", ".join(limits) or "-"))
    return markdown_table(("architecture", "native scheme", *schemes, "the stock model itself fails"), rows)


def cell(record: FoundRecord, scheme: str) -> str:
    """`yes`, `**no**`, or `-` for a scheme that is refused."""
    found = record.get("findings", {}).get(scheme)
    if not found or any(finding["verdict"] == "fail" for finding in found.values()):
        return "**no**"
    return "-" if found.get("patch", {}).get("verdict") == "refused" else "yes"


def listed(records: list[FoundRecord], verdict: str) -> list[str]:
    """A line for each architecture and finding of a verdict, with the schemes that have it."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if "died" in record and verdict == "fail":
            lines[_name(record), "", _last_line(record["died"])] = ["all"]
        for scheme, found in record.get("findings", {}).items():
            for name, finding in found.items():
                if finding["verdict"] == verdict and (name != "patch" or record.get("part") or verdict == "fail"):
                    value = "" if finding["value"] is None else f" {finding['value']:.1e}"
                    lines.setdefault((_name(record), f"{name}{value}", finding["note"]), []).append(scheme)
    return [
        f"- {pair}, {', '.join(schemes)}: {f'{check} {note}'.strip()}" for (pair, check, note), schemes in lines.items()
    ]


def _name(record: FoundRecord) -> str:
    part = record.get("part")
    return f"{record['pair']}, {part}" if part else str(record["pair"])


def _short(record: FoundRecord) -> str:
    name = str(record["pair"]).removeprefix(f"{record['kind']}-")
    part = record.get("part")
    return f"{name}, {part}" if part else name


def _last_line(died: str) -> str:
    """The error at the end of a traceback, whose paths are those of one machine."""
    return died.strip().splitlines()[-1]
