"""The numbers in docs/explanation/reliability.md are those of the tests, and the files it names exist.

How many damaged files there are is compared by tests/hostile/test_damaged_files.py, which reads them.
"""

from __future__ import annotations

import re
from pathlib import Path

from hf_posenc.schemes import list_schemes, validation
from tests.hostile import child, test_damaged_files
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.test_behaviour import cells
from tests.schemes.table import TABLE, VARIANTS
from tests.schemes.test_option_limits import EXTREME, WRONG

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")
#: Line breaks may stand anywhere in a sentence.
TEXT = " ".join(PAGE.split())


def test_the_counts_are_those_of_the_tables() -> None:
    pairs = len(cells(ARCHITECTURES, turn=0).args[1])
    assert set(list_schemes()) <= set(TABLE)
    assert f"{len(ARCHITECTURES)} builds of architectures" in TEXT
    # Lower bounds, so that another scheme does not change the page.
    for number, what in ((len(VARIANTS), "variants"), (pairs, "pairs")):
        (bound,) = re.findall(rf"more than (\d+) {what}", TEXT)
        assert int(bound) < number < 1.5 * int(bound)
    assert f"every option and sub-option gets {len(WRONG) + len(EXTREME)} values" in TEXT


def test_the_limits_are_those_of_the_code() -> None:
    powers = {
        "rows of a table with one row per position": validation.MOST_ROWS,
        "distinct distances of a bias": validation.MOST_DISTANCES,
        "width of a network or of a sum of cosines": validation.LARGEST_WIDTH,
        "layers of a schedule": validation.MOST_LAYERS,
        "values in the JSON form of a scheme": validation.MOST_VALUES,
    }
    rows = {words: f"2**{value.bit_length() - 1}" for words, value in powers.items()}
    assert all(value == 1 << value.bit_length() - 1 for value in powers.values())
    rows |= {
        "nesting depth of schemes": str(validation.DEEPEST_NESTING),
        "schemes combined in one layer": str(validation.MOST_PARTS),
        "the base of frequencies": f"{validation.SMALLEST_BASE:.0e} to {validation.LARGEST_BASE:.0e}".replace("+", ""),
    }
    for words, value in rows.items():
        assert f"| {words} | {value} |" in PAGE
    assert validation.LARGEST_LENGTH == 2**31 - 1
    assert validation.LARGEST_FACTOR == 1e6
    seconds, megabytes = test_damaged_files.SECONDS, test_damaged_files.MEGABYTES
    assert f"{seconds:g} seconds of processor time and {megabytes:g} MB per file" in TEXT
    assert seconds < child.SECONDS, "the limit of the process is behind the one that is promised"
