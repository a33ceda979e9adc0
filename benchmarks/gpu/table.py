"""`table.md` of the kit: the machine, what is wrong, what is refused, the price, and the study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.part import CANNOT_TELL, CRASHED, OK, REFUSED, SKIPPED, STATUSES, WRONG
from benchmarks.gpu.store import cells_left
from hf_posenc.report.tables import markdown_table

_MOST_NAMES = 6


def format_kit(content: dict[str, Any]) -> str:
    """The text of `table.md`.

    Args:
        content: of `results.json`.
    """
    parts = content["parts"]
    sections = [_introduction(content)]
    if "correctness" in parts:
        sections += _correctness(parts["correctness"])
    if "price" in parts:
        sections += _price(parts["price"])
    if "study" in parts:
        sections += _study(parts["study"])
    return "\n\n".join(section for section in sections if section) + "\n"


def _introduction(content: dict[str, Any]) -> str:
    from benchmarks.subnormals import subnormal_line
    from benchmarks.table import place

    machines: dict[str, list[str]] = {}
    for name, part in content["parts"].items():
        machine = part["machine"]
        told = (
            f"{place(machine)}; Python {machine['python']}, torch {machine['torch']}, transformers "
            f"{machine['transformers']}, hf-posenc {machine['hf-posenc']} (source `{machine['hf-posenc source']}`)"
        )
        machines.setdefault(told, []).append(name)
    where = [f"{told}: {', '.join(names)}." if len(machines) > 1 else f"{told}." for told, names in machines.items()]
    missing = [f"- `{package}` is not installed: {reason}" for package, reason in content.get("missing", {}).items()]
    commands = "\n".join(content["commands"])
    left = {name: cells_left(part) for name, part in content["parts"].items()}
    unfinished = [f"- {len(cells)} cells of {name} were not run yet" for name, cells in left.items() if cells]
    parts = [
        "# hf_posenc on this machine",
        "\n".join(where),
        subnormal_line(content["subnormals"]) if "subnormals" in content else "",
        smoke_line(content),
        f"```bash\n{commands}\n```",
        "\n".join([*missing, *unfinished]),
    ]
    return "\n\n".join(part for part in parts if part)


def _correctness(part: dict[str, Any]) -> list[str]:
    rows = part["rows"]
    settings = part["settings"]
    run = {words[3] for words in (cell.split(" ") for cell in rows) if len(words) > 3}
    dtypes = [dtype for dtype in settings["tolerances"] if dtype in run]
    tolerances = ", ".join(f"{settings['tolerances'][dtype]:g} in {dtype}" for dtype in dtypes)
    explained = (
        "Tiny models with random weights on this device, against the same models on the CPU in float64 with eager "
        "attention. The error of a token is the norm of the difference of its logits over the mean norm of all logits; "
        "the largest one counts. Tolerated is "
        f"{tolerances}, or {settings['factor']:g} times the error of the CPU in the same dtype where that is more."
    )
    counts: dict[tuple[str, str], Counter[str]] = {}
    worst: dict[tuple[str, str], dict[str, float]] = {}
    for cell, row in rows.items():
        place = _place(cell)
        counts.setdefault(place, Counter())[row["status"]] += 1
        if row.get("error") is not None:
            errors = worst.setdefault(place, {})
            dtype = cell.split(" ")[3]
            errors[dtype] = max(errors.get(dtype, 0.0), row["error"] / row["tolerance"])
    lines = []
    for place, found in counts.items():
        shares = (_share(worst.get(place, {}), dtype) for dtype in dtypes)
        lines.append((*place, *(str(found[status] or "-") for status in STATUSES), *shares))
    head = ("check", "back-end", *STATUSES, *(f"worst error over tolerance, {dtype}" for dtype in dtypes))
    return [
        "## Correctness",
        explained,
        markdown_table(head, lines),
        _listed("What is wrong", rows, WRONG),
        _listed("What crashed", rows, CRASHED),
        _grouped("What is refused", rows, REFUSED),
        _grouped("What was skipped", rows, SKIPPED),
        _blind(rows),
    ]


def _place(cell: str) -> tuple[str, str]:
    words = cell.split(" ")
    return (words[0], words[-1])


def _share(errors: dict[str, float], dtype: str) -> str:
    return f"{errors[dtype]:.2f}" if dtype in errors else "-"


def _listed(title: str, rows: dict[str, Any], status: str) -> str:
    lines = []
    for cell, row in rows.items():
        if row["status"] != status:
            continue
        if "failed" in row:
            told = f"{row['reason']}\n" + "\n".join(f"  - {one}" for one in row["failed"])
        elif "reason" in row:
            told = row["reason"] + (f" ({row['where']})" if "where" in row else "")
        else:
            told = f"error {row['error']:g}, tolerance {row['tolerance']:g}"
        lines.append(f"- `{cell}`: {told}")
    return f"### {title}\n\n" + "\n".join(lines) if lines else ""


def _grouped(title: str, rows: dict[str, Any], status: str) -> str:
    """One line for each reason."""
    cells: dict[str, list[str]] = {}
    for cell, row in rows.items():
        if row["status"] == status:
            cells.setdefault(row["reason"], []).append(cell)
    lines = [f"- {reason} ({_named(found)})" for reason, found in sorted(cells.items(), key=lambda item: -len(item[1]))]
    return f"### {title}\n\n" + "\n".join(lines) if lines else ""


def _named(cells: Sequence[str]) -> str:
    more = f", and {len(cells) - _MOST_NAMES} more" if len(cells) > _MOST_NAMES else ""
    return ", ".join(f"`{cell}`" for cell in cells[:_MOST_NAMES]) + more


def _blind(rows: dict[str, Any]) -> str:
    """Rows whose tolerance is at least as large as what the scheme does."""
    found: dict[str, set[str]] = {}
    for cell, row in rows.items():
        if row["status"] == CANNOT_TELL:
            words = cell.split(" ")
            found.setdefault(f"{words[1]}, {words[3]}", set()).add(words[2])
    if not found:
        return ""
    lines = [f"- {place}: {', '.join(f'`{name}`' for name in sorted(names))}" for place, names in found.items()]
    explained = "What these schemes do at this length is less than the tolerance, so that no error in them would show."
    return f"### Cannot tell\n\n{explained}\n\n" + "\n".join(lines)


def _price(part: dict[str, Any]) -> list[str]:
    from benchmarks.table import figure_tables

    measured = {cell: row for cell, row in part["rows"].items() if row["status"] == OK}
    # The goals are those of a GPU wherever the kit was run.
    settings = part["settings"] | {"device": "cuda"}
    content = {"settings": settings, "cells": measured, "memory": {}, "not_begun": cells_left(part)}
    explained = (
        f"{part['settings']['dtype']}. Time over that of the same model with no position at all (`bare`), as in "
        "[what position costs](../../performance.md). Behind an `@` stands the attention back-end; without one it is "
        "sdpa. Called from Python, without CUDA graphs: where a model is small, that is part of the time."
    )
    # The headings of the other table are those of a page of its own.
    tables = [table.replace("\n## ", "\n### ").replace("## ", "### ", 1) for table in figure_tables(content) if table]
    return ["## Price", explained, *tables, _listed("Cells that crashed", part["rows"], CRASHED)]


def _study(part: dict[str, Any]) -> list[str]:
    rows = [row for row in part["rows"].values() if row["status"] == OK]
    what = "Tiny models, a few steps each" if part["settings"].get("smoke") else "`training/studies/gpu.yaml`"
    sections = ["## Study", f"{what}, on the pages and code of this repository, as bytes."]
    for task in dict.fromkeys(row["task"] for row in rows):
        found = [row for row in rows if row["task"] == task]
        kind = "loss" if "loss" in found[0] else "accuracy"
        lengths = found[0]["lengths"]
        head = ("scheme", "seed", *(f"{kind} at {length}" for length in lengths), "ms per step", "parameters")
        lines = [
            (
                f"`{row['scheme']}`",
                str(row["seed"]),
                *("-" if value is None else f"{value:.3f}" for value in row[kind]),
                f"{row['milliseconds_per_step']:.1f}",
                f"{row['parameters']:,}",
            )
            for row in found
        ]
        sections.append(f"### {task}\n\n" + markdown_table(head, lines))
    sections += [
        _listed("Trainings that crashed", part["rows"], CRASHED),
        _grouped("Trainings that are refused", part["rows"], REFUSED),
    ]
    return sections


#: By part.
_LEFT_OUT = {
    "correctness": "in correctness most schemes, float16 and the repository's own tests",
    "price": "in price the shape of SmolLM2-135M and inputs of 1,024 tokens and more, which the targets are about",
    "study": "in the study everything but a few steps of tiny models",
}
_NO_COMPILER = (
    "on a CPU the code that torch.compile generates (models are traced, FlexAttention runs as plain operations)"
)


def smoke_line(content: dict[str, Any]) -> str:
    """One line for the table of a smoke run, empty for any other.

    Args:
        content: of `results.json`.
    """
    parts = {name: part for name, part in content["parts"].items() if part["settings"].get("smoke")}
    if not parts:
        return ""
    left_out = [_LEFT_OUT[name] for name in parts]
    if any(part["settings"]["device"] == "cpu" for part in parts.values()):
        left_out.append(_NO_COMPILER)
    return (
        "**A smoke run: it shows that every part runs, with tiny models and short inputs, and its figures mean "
        f"nothing.** Left out to save time: {'; '.join(left_out)}."
    )
