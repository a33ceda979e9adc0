"""Text tables, and how they fit a terminal."""

import pytest

from hf_posenc.report.tables import fitted_to, format_table

HEADERS = ["scheme", "what it is", *(f"loss at {length}" for length in (128, 512, 1024, 4096))]
ROWS = [
    ["rope:theta=500000.0,layout=interleaved", "angles proportional to a position", "1.65 ± 0.02", "1.7", "-", "9"],
    ["alibi", "a penalty on distance", "1.61 ± 0.02", "1.6", "1.6", "1.6"],
]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_every_line_fits_and_nothing_is_lost(width):
    with fitted_to(width):
        table = format_table(HEADERS, ROWS)
    assert max(map(len, table.splitlines())) <= width
    for cell in ("1.65 ± 0.02", "1.61 ± 0.02", "alibi"):
        assert cell in table
    assert {"angles", "proportional", "position", "penalty", "distance"} <= set(table.split())


def test_columns_that_do_not_fit_follow_behind_the_first_one_again():
    with fitted_to(40):
        first, *others = format_table(HEADERS, ROWS).split("\n\n")
    assert others
    assert all("alibi" in block for block in (first, *others))
    with fitted_to(40):  # Markdown does not wrap.
        assert len(format_table(HEADERS, ROWS, form="markdown").splitlines()) == 2 + len(ROWS)


def test_a_table_that_fits_is_as_it_was():
    free = format_table(HEADERS, ROWS)
    with fitted_to(max(map(len, free.splitlines()))):
        assert format_table(HEADERS, ROWS) == free
    assert len(free.splitlines()) == 2 + len(ROWS)
