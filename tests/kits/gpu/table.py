"""`table.md` of the kit: the machine, what is wrong, what is refused, and the launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.machine import machine_line, subnormal_line
from benchmarks.subjects import STOCK
from hf_posenc.report.tables import format_table
from tests.kits.gpu.rows import CANNOT_TELL, CRASHED, OK, REFUSED, SKIPPED, STATUSES, WRONG, PartFile, Row

_MOST_NAMES = 6
#: How a heading names the cells of a status.
_SAID = {
    OK: "that are right",
    WRONG: "with an error above the tolerance",
    REFUSED: "that are refused",
    CRASHED: "that crashed",
    SKIPPED: "that were skipped",
    CANNOT_TELL: "that would not notice a missing scheme",
}


def format_kit(files: Mapping[str, PartFile]) -> str:
    """The text of `table.md`."""
    sections = ["# hf_posenc on this machine"]
    tables = {"correctness": _correctness, "launches": _launches}
    for part, file in files.items():
        header = file.headers[-1]
        commands = "\n".join(dict.fromkeys(run["command"] for run in file.headers))
        sections += [
            f"## {part.capitalize()}",
            f"{machine_line(header['machine'])}. {subnormal_line(header['subnormals'])}",
            f"```bash\n{commands}\n```",
            "**A smoke run shows that every part runs. Its models and inputs are tiny, and its figures mean nothing.**"
            if header["settings"]["smoke"]
            else "",
            f"{len(file.left)} of {len(header['cells'])} cells were not run yet." if file.left else "",
            f"Not installed, and what needs it left out: {', '.join(header['missing'])}." if header["missing"] else "",
            *tables[part](file),
            *(_reasons(file.rows, status) for status in STATUSES),
        ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _correctness(file: PartFile) -> list[str]:
    tolerances = file.headers[-1]["settings"]["tolerances"]
    places: dict[tuple[str, str], list[tuple[str, Row]]] = {}
    for cell, row in file.rows.items():
        words = cell.split(" ")
        places.setdefault((words[0], words[-1]), []).append((words[-2], row))
    lines = []
    for place, of_place in places.items():
        counts = Counter(row["status"] for _, row in of_place)
        line = [*place, *(str(counts[status] or "-") for status in STATUSES)]
        for dtype in tolerances:
            errors = [row["error"] / row["tolerance"] for name, row in of_place if name == dtype and row.get("error")]
            line.append(f"{max(errors):.2f}" if errors else "-")
        lines.append(line)
    head = ("check", "backend", *STATUSES, *(f"worst error over tolerance, {dtype}" for dtype in tolerances))
    named = ", ".join(f"{tolerance:g} in {name}" for name, tolerance in tolerances.items())
    explained = (
        "Tiny models with random weights on this device, against the same models on the CPU in float64 with eager "
        "attention. The error of a token is the norm of the difference of its logits over the mean norm of all logits; "
        f"the largest one counts. The tolerance is {named}, or {file.headers[-1]['settings']['factor']:g} times the "
        "error of the CPU in the same dtype where that is more."
    )
    return [explained, format_table(head, lines, form="markdown")]


def _launches(file: PartFile) -> list[str]:
    phases: dict[tuple[str, str], dict[str, Row]] = {}
    for cell, row in file.rows.items():
        phase, kind, scheme = cell.split(" ")
        if "kernels" in row:
            phases.setdefault((kind, phase), {})[scheme] = row
    phases = {place: by_scheme for place, by_scheme in phases.items() if STOCK in by_scheme}
    lines = []
    for scheme in sorted({scheme for by_scheme in phases.values() for scheme in by_scheme} - {STOCK}):
        cells = [
            _more(by_scheme[scheme], by_scheme[STOCK]) if scheme in by_scheme else "-" for by_scheme in phases.values()
        ]
        lines.append([scheme, *cells])
    names = [
        f"{kind}, {phase} (stock {by_scheme[STOCK]['kernels']}, {_attention(by_scheme[STOCK])})"
        for (kind, phase), by_scheme in phases.items()
    ]
    explained = (
        f"Kernels and copies that one call starts, less those of the stock model, with sdpa, in "
        f"{file.headers[-1]['settings']['dtype']}; the kernel that attention takes; and how often the host waits for "
        "the device more than in the stock model. On a CPU operators are counted."
    )
    return [explained, format_table(("scheme", *names), lines, form="markdown")]


def _more(row: Row, stock: Row) -> str:
    waits = row["waits"] - stock["waits"]
    return f"{row['kernels'] - stock['kernels']:+}, {_attention(row)}" + (f", {waits:+} waits" if waits else "")


def _attention(row: Row) -> str:
    """The kernels of attention, by name."""
    return " and ".join(sorted(row["attention"])) or "none"


def _reasons(rows: Mapping[str, Row], status: str) -> str:
    """One line for each reason of a status, with the first cells that have it."""
    cells: dict[str, list[str]] = {}
    for cell, row in rows.items():
        if row["status"] == status and "reason" in row:
            cells.setdefault(row["reason"], []).append(cell)
    lines = []
    for reason, names in sorted(cells.items(), key=lambda item: -len(item[1])):
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        lines.append(f"- {reason} ({', '.join(f'`{cell}`' for cell in names[:_MOST_NAMES])}{more})")
    return f"### Cells {_SAID[status]}\n\n" + "\n".join(lines) if lines else ""
