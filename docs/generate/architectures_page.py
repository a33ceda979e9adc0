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
    "whole": ("Text models", tuple(TEXT_SCHEMES)),
    "text": ("Text parts and connectors", tuple(TEXT_SCHEMES)),
    "vision": ("Vision parts", tuple(GRID_SCHEMES)),
    "series": ("Audio and time-series parts", tuple(SERIES_SCHEMES)),
}
#: The column of a model all of which is refused, if its kind is not a kind of text.
_OF_WHOLE = {"vision": "vision", "video": "vision", "audio": "series", "time series": "series"}


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
        "## Refused with every scheme",
        "For these, `patch_model` raises an `UnsupportedError` and does not change the model.",
        _folded(("architecture", "reason"), refused),
        "## Refused in part",
        _folded(("architecture", "schemes", "reason"), _notes(records, "refused")),
        *(("## What fails", "\n".join(f"- {line}" for line in failed)) if failed else ()),
        "## Without softmax self-attention",
        _folded(("architecture", "what it has instead"), without),
        "## Not built",
        _folded(("architecture", "reason"), unbuilt),
        _checks(),
    )
    return "\n\n".join(sections) + "\n"


#: `docs/_static/tables.js` makes a box of it that filters the rows below.
_FILTER = '<p class="row-filter" data-example="llama, vision refused, t5=no"></p>'


def _introduction(records: list[FoundRecord]) -> str:
    return f"""# Architectures

<!-- Written by docs/generate/architectures.py. Edits are lost. -->

{_counts(records)}

{_summary(records)}

The tables below have a row for each part of each architecture:

- `{YES}`: [every check](#what-is-checked) passes.
- `{REFUSED}`: `patch_model` raises an `UnsupportedError` ([the reasons](#refused-in-part)).
- `{NO}`: a check fails.

Each column stands for one kind of scheme. For other schemes see [Limits](limits.md), or try one on your model:
`patch_model` does not change the model if it raises an error."""


def _counts(records: list[FoundRecord]) -> str:
    """How many architectures there are, and what became of them."""
    types: dict[str, list[FoundRecord]] = {}
    for record in records:
        types.setdefault(record["model_type"], []).append(record)
    state = Counter(_state(of_type) for of_type in types.values())
    attending = len(types) - state["without"]
    return (
        "This page shows how hf_posenc works with each architecture of transformers. transformers "
        f"{transformers.__version__} has **{len(types)} architectures**. {state['without']} of them have no softmax "
        f"self-attention. Of the other {attending}:\n\n"
        f"- **{state['works']} work**: in every part, each scheme passes all checks, or raises an error that says why\n"
        + (f"- {state['fails']} fail a check\n" if state["fails"] else "")
        + f"- {state['refused']} are refused with every scheme\n"
        f"- {state['unbuilt']} were not built for this test"
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
    header = ("kind", "rows", "refused entirely", "native scheme known", "cells yes", "refused", "no")
    return markdown_table(header, rows)


def _folded(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table that opens on a click: the page has more than a thousand rows."""
    rows = list(rows)
    count = f"{len(rows)} row{'s' * (len(rows) != 1)}"
    return f"<details><summary>{count}</summary>\n\n{markdown_table(header, rows)}\n\n</details>"


def _tables_of_kind(kind: str, records: list[FoundRecord]) -> str:
    tables = []
    for columns, (title, schemes) in _COLUMNS.items():
        rows = [_row(record, schemes) for record in _placed(records) if _columns_of(record) == columns]
        if rows:
            header = ("architecture", "native scheme", *schemes, "stock model fails")
            named = "" if kind in WITH_VOCABULARY_HEAD else f"### {title}\n\n"
            tables.append(named + _folded(header, rows))
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
    kind = record["kind"]
    if kind in WITH_VOCABULARY_HEAD:
        return "whole"
    # A model that is refused before its parts are known has only its kind.
    whole = record.get("refusal") and not record.get("part")
    return _OF_WHOLE.get(kind, "text") if whole else str(record.get("columns", "text"))


def _schemes_of(record: FoundRecord) -> tuple[str, ...]:
    return _COLUMNS[_columns_of(record)][1]


def _name(record: FoundRecord) -> str:
    part = record.get("part")
    return f"{record['pair']}, {part}" if part else str(record["pair"])


def _checks() -> str:
    same = ", ".join(f"{name} ({owner})" for name, owner in sorted(aliases().items()))
    return f"""## What is checked

`python docs/generate/architectures.py` builds a tiny model with random weights for each architecture in the auto
mappings of transformers, and for variants that the default config does not show. It runs the checks of
`tests/architectures` for each scheme in each part. Last run: transformers {transformers.__version__}, torch
{torch.__version__.split("+")[0]}, float32 on a CPU. All findings are in `docs/results/architectures.json`.

- **native**: `patch_model(model, native_scheme(model))` reproduces the stock outputs to within {NATIVE_BOUND:g} of
  their standard deviation, or {SAME_BOUND:g} for images and sound of another size.
- **none**: the outputs differ from stock and still depend on content, but not on the order of tokens. In models that
  are causal, this is checked on the last token of a single layer. In vision models with one token per patch,
  shuffling the patches shuffles the outputs.
- **all other schemes**: the outputs, or those of attention in a part, differ from stock and from `none`. In text
  models, every layer makes a difference on its own (except with `sinusoidal`, which acts before the layers), and the
  outputs depend on the order of tokens. In vision models with one token per patch, shuffling the patches changes the
  outputs.
- **always**: eager attention gives the outputs of the default attention. `unpatch_model` restores the outputs bit for
  bit, and does not leave changes in weights, instances, classes, modules or the config.
- **text models and text parts**: decoding with a cache and left padding give the logits of the full, unpadded forward
  pass; in text models, also with a static cache. A patch of the text part leaves all other parts unchanged, bit for
  bit.
- **vision, audio and time-series parts**: an input of another size runs.

Unless noted, "equal" means to within {SAME_BOUND:g}. In the columns, `rope` has a theta of 100, and `shaw` has a
maximum distance of 4. `rope_nd` and the columns with `(grid)` use rows and columns, and frames in videos.
`rope (raster)` numbers the patches row by row. If the stock model fails a check itself, this does not count as a
failure: the last column names the check.

A model type counts as an architecture if it has its own main class. These are other names of the same class: {same}."""
