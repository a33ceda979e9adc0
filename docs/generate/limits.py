"""Writes the table of environments into docs/reference/limits.md, from `hf_posenc.schemes.refusals`.

python docs/generate/limits.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "reference" / "limits.md"
_START = "<!-- Written by docs/generate/limits.py from here on. Edits are lost. -->\n"
_END = "<!-- Until here. -->\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(PAGE.read_text()))


def page(text: str) -> str:
    """The page with its table replaced."""
    before, rest = text.split(_START)
    return f"{before}{_START}{table()}{rest[rest.index(_END) :]}"


def table() -> str:
    """What each environment cannot run and why, and which schemes have each need, in a causal model."""
    from hf_posenc.report.tables import markdown_table
    from hf_posenc.schemes.needs import Environment, Need, needs_of
    from hf_posenc.schemes.refusals import ENVIRONMENTS
    from tests.schemes.table import TABLE
    from tests.schemes.table.row import context_for

    schemes: dict[Need, list[str]] = {need: [] for need in Need}
    for name, row in TABLE.items():
        for need in needs_of(row.variants[0].build(context_for(row.variants[0]))):
            schemes[need].append(f"`{name}`")

    schemes[Need.CROSS].append("all that are given as `cross_attention`")

    def refused(environment: Environment) -> str:
        reasons: dict[str, list[str]] = {}
        for need, reason in environment.lacks.items():
            reasons.setdefault(reason, []).append(need.value)
        return "; ".join(f"{_any(needs)}, {reason}" for reason, needs in reasons.items())

    environments = [[each.name.rstrip(","), refused(each), each.remedy] for each in ENVIRONMENTS]
    needs = [[need.value, ", ".join(names) or "with some options only"] for need, names in schemes.items()]
    return (
        "\n\n".join(
            (
                markdown_table(["Environment", "Cannot run a scheme that", "Instead"], environments),
                markdown_table(["A scheme that", "Schemes"], needs),
            )
        )
        + "\n"
    )


def _any(words: list[str]) -> str:
    """The words as in "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


if __name__ == "__main__":
    main()
