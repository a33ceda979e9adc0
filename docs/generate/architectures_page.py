"""The page of architectures, from the record of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from hf_posenc.report.tables import markdown_table
from tests.architectures.findings import NATIVE_BOUND, SAME_BOUND
from tests.architectures.part_schemes import GRID_SCHEMES, SERIES_SCHEMES, TEXT_SCHEMES
from tests.architectures.population import KINDS, WITH_VOCABULARY_HEAD, aliases

#: `Record.to_dict` with the kind and the model type, or the pair and why its process died.
FoundRecord = dict[str, Any]

YES, REFUSED, NO = "yes", "refused", "no"
#: What a row reads, and the schemes that are placed in it.
_COLUMNS = {
    "whole": ("Models of text", tuple(TEXT_SCHEMES)),
    "text": ("Parts that read tokens, and what connects parts", tuple(TEXT_SCHEMES)),
    "vision": ("Parts that read pictures and videos", tuple(GRID_SCHEMES)),
    "series": ("Parts that read sound and series", tuple(SERIES_SCHEMES)),
}


def document(records: list[FoundRecord]) -> str:
    """The page."""
    refused = [(_name(record), record["refusal"]) for record in records if record.get("refusal")]
    without = [(record["pair"], record["without"]) for record in records if record.get("without")]
    unbuilt = [(record["pair"], record["unbuilt"]) for record in records if record.get("unbuilt")]
    failed = failures(records)
    sections = (
        _introduction(records),
        _FILTER,
        *(_tables_of_kind(kind, [record for record in records if record["kind"] == kind]) for kind in KINDS),
        "## Refused with every scheme\n\n`UnsupportedError`; the model is left unchanged.",
        markdown_table(("architecture", "reason"), refused),
        "## Refused in part",
        markdown_table(("architecture", "schemes", "reason"), _notes(records, "refused")),
        *(("## What fails", "\n".join(f"- {line}" for line in failed)) if failed else ()),
        "## Without softmax self-attention",
        markdown_table(("architecture", "what it has instead"), without),
        "## Not built",
        markdown_table(("architecture", "reason"), unbuilt),
        _checks(),
    )
    return "\n\n".join(sections) + "\n"


#: A box above the tables. `filter_rows.js` hides the rows that do not contain its words.
_FILTER = """```{raw} html
<p class="row-filter">
<label for="row-filter">Show rows with</label>
<input id="row-filter" type="search" placeholder="llama, vision refused, t5" autocomplete="off">
<output for="row-filter"></output>
</p>
<script defer src="../_static/filter_rows.js"></script>
```"""


def _introduction(records: list[FoundRecord]) -> str:
    return f"""# Architectures

<!-- Written by docs/generate/architectures.py. Edits are lost. -->

{_counts(records)}

{_summary(records)}

A cell says `{YES}` if every check passes ([which ones](#what-is-checked)), `{REFUSED}` if an `UnsupportedError` says
why the scheme does not suit the part ([the reasons](#refused-in-part)), and `{NO}` if a check fails. Each
column is one scheme of its kind. For others see [Limits](limits.md), or patch a tiny model of the architecture. The
models are the smallest of their kind: no model of text has layers that read the keys of earlier ones, for example."""


def _counts(records: list[FoundRecord]) -> str:
    """How many architectures there are, and what became of them."""
    types: dict[str, list[FoundRecord]] = {}
    for record in records:
        types.setdefault(record["model_type"], []).append(record)
    state = Counter(_state(of_type) for of_type in types.values())
    attending = len(types) - state["without"]
    return (
        f"transformers {transformers.__version__} has **{len(types)} architectures**, {state['without']} of them "
        f"without softmax self-attention. Of the {attending} others, {state['works']} work: each scheme passes in "
        f"every part, or is refused there with a reason. {state['fails']} fail a check, {state['refused']} are refused "
        f"with every scheme, and {state['unbuilt']} were not built here."
    )


def _state(records: list[FoundRecord]) -> str:
    """What became of one architecture, over its heads, variants and parts."""
    for name in ("unbuilt", "without"):
        if all(record.get(name) for record in records):
            return name
    placed = _placed(records)
    cells = [cell(record, scheme) for record in placed for scheme in _schemes_of(record)]
    if NO in cells or any("died" in record for record in records):
        return "fails"
    return "works" if any(cell(record, one) == YES for record in placed for one in _schemes_of(record)[1:]) else REFUSED


def _summary(records: list[FoundRecord]) -> str:
    rows = []
    for columns, (title, schemes) in _COLUMNS.items():
        of_kind = [record for record in records if _columns_of(record) == columns and not record.get("without")]
        built = [record for record in of_kind if not record.get("unbuilt")]
        placed = _placed(built)
        native = Counter(cell(record, schemes[0]) for record in placed)
        others = Counter(cell(record, scheme) for record in placed for scheme in schemes[1:])
        counts = (len(built), len(built) - len(placed), native[YES], others[YES], others[REFUSED])
        rows.append((title, *map(str, counts), str(native[NO] + others[NO])))
    header = ("what it reads", "rows", "refused", "native scheme has a name", "schemes work", "refused there", "fail")
    return markdown_table(header, rows)


def _tables_of_kind(kind: str, records: list[FoundRecord]) -> str:
    tables = []
    for columns, (title, schemes) in _COLUMNS.items():
        rows = [_row(record, schemes) for record in _placed(records) if _columns_of(record) == columns]
        if rows:
            header = ("architecture", "native scheme", *schemes, "the stock model itself fails")
            named = "" if kind in WITH_VOCABULARY_HEAD else f"### {title}\n\n"
            tables.append(named + markdown_table(header, rows))
    return "\n\n".join((f"## {KINDS[kind]}", *(tables or ["None with softmax self-attention."])))


def _row(record: FoundRecord, schemes: tuple[str, ...]) -> tuple[str, ...]:
    native = record.get("native", "")
    limits = [name for name, one in record["findings"].get("none", {}).items() if one["verdict"] == "stock"]
    name = _name(record).removeprefix(f"{record['kind']}-")
    cells = [cell(record, scheme) for scheme in schemes]
    return name, "no name" if native.startswith("(") else native, *cells, ", ".join(limits) or "-"


def cell(record: FoundRecord, scheme: str) -> str:
    """What became of a scheme in one row."""
    found = record["findings"].get(scheme)
    if found is None or any(finding["verdict"] == "fail" for finding in found.values()):
        return NO
    refused = any(found.get(name, {}).get("verdict") == "refused" for name in ("patch", "forward"))
    return REFUSED if refused else YES


def failures(records: list[FoundRecord]) -> list[str]:
    """A line for each failure, and for each process that died."""
    died = [f"{record['pair']}: {record['died']}" for record in records if "died" in record]
    return died + [f"{name}, {schemes}: {note}" for name, schemes, note in _notes(records, "fail")]


def _notes(records: list[FoundRecord], verdict: str) -> Iterable[tuple[str, str, str]]:
    """The findings of a verdict: the row, the schemes that have it, and the check with what it noted."""
    lines: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for scheme, found in record.get("findings", {}).items():
            for name, finding in found.items():
                if finding["verdict"] == verdict:
                    value = "" if finding["value"] is None else f"{finding['value']:.1e} "
                    check = "" if name == "patch" else f"{name}: "
                    note = " ".join(f"{check}{value}{finding['note']}".split()).replace("|", "\\|")
                    lines.setdefault((_name(record), note), []).append(scheme)
    return [(name, ", ".join(schemes), note) for (name, note), schemes in lines.items()]


def _placed(records: Iterable[FoundRecord]) -> list[FoundRecord]:
    """The rows in which a scheme can be placed."""
    left_out = ("refusal", "without", "unbuilt", "died")
    return [record for record in records if not any(record.get(name) for name in left_out)]


def _columns_of(record: FoundRecord) -> str:
    return "whole" if record["kind"] in WITH_VOCABULARY_HEAD else str(record.get("columns", "text"))


def _schemes_of(record: FoundRecord) -> tuple[str, ...]:
    return _COLUMNS[_columns_of(record)][1]


def _name(record: FoundRecord) -> str:
    part = record.get("part")
    return f"{record['pair']}, {part}" if part else str(record["pair"])


def _checks() -> str:
    same = ", ".join(f"{name} ({owner})" for name, owner in sorted(aliases().items()))
    return f"""## What is checked

`python docs/generate/architectures.py` builds a tiny random model (64 wide, 4 heads, window 8, every gate open) of each
architecture in transformers' auto mappings, and of variants that a default config hides, and runs the checks in
`tests/architectures` for each scheme in each part. Last run: transformers {transformers.__version__},
torch {torch.__version__.split("+")[0]}, float32 on a CPU. The findings are in `docs/results/architectures.json`.

- **native**: `patch_model(model, native_scheme(model))` gives the stock outputs to {NATIVE_BOUND:g} of their
  standard deviation, and those for pictures or sound of another size to {SAME_BOUND:g};
- **none**: the outputs differ from stock, do not depend on the order of tokens (last token of a one-layer causal model,
  or any bidirectional model; {SAME_BOUND:g}), and attention still depends on content. In a vision model with one token
  per patch, shuffled patches give the same tokens, shuffled; in a picture of one colour, some neighbours are equal;
- **every other scheme**: the outputs, or those of attention in a part, differ from stock and from `none`. In models of
  text they differ in every layer taken alone (`sinusoidal` acts before the layers), and depend on the order of tokens
  in one layer; in a vision model with one token per patch, shuffled patches give other tokens;
- all of them: eager attention gives the outputs of the default one ({SAME_BOUND:g}); `unpatch_model` gives bit-equal
  outputs and leaves no trace on weights, instances, classes, modules or the config;
- text and text parts: decoding with a cache (of the whole prompt, pictures and sound included) and left padding give
  the logits of the full, unpadded forward ({SAME_BOUND:g}), in models of text also with a static cache. What other
  parts compute is bit-equal when the text part is patched;
- parts that read pictures, sound and series: an input of another size runs.

Schemes: rope has theta 100, shaw a maximal distance of 4. Columns with `(grid)` and rope_nd read rows and columns (in
videos frames too), `rope (raster)` reads the patches in raster order. That a model could not be run to look at its
positions does not count as a reason. A check that the stock model fails too does not count as a failure; the last
column names it.

Model types are counted if they have a main class of their own. Other names of the same class: {same}."""
