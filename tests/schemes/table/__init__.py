"""One row per scheme: the variants that the generic tests go through, and the reference each must equal.

A new scheme adds a row to the file of its family; `test_all_schemes.py` fails until it does.
"""

from __future__ import annotations

from hf_posenc.schemes import SchemeConfig

from . import (
    arrangements,
    content_biases,
    coordinates,
    distance_biases,
    position_biases,
    position_maps,
    rotations,
    scales,
    seeds,
)
from .row import HEAD_DIM, HEADS, HIDDEN, KEY_VALUE_HEADS, LogitCase, Row, context_for, parts_for, positions_of

FAMILIES = (
    seeds,
    distance_biases,
    content_biases,
    rotations,
    coordinates,
    position_biases,
    position_maps,
    scales,
    arrangements,
)
TABLE: dict[str, Row] = {name: row for family in FAMILIES for name, row in family.ROWS.items()}


def variants_of(rows: dict[str, Row]) -> list[tuple[str, SchemeConfig, str]]:
    """Name, config and label of each variant."""
    return [
        (name, config, f"{name}-{index}") for name, row in rows.items() for index, config in enumerate(row.variants)
    ]


VARIANTS = variants_of(TABLE)

__all__ = [
    "HEADS",
    "HEAD_DIM",
    "HIDDEN",
    "KEY_VALUE_HEADS",
    "TABLE",
    "VARIANTS",
    "LogitCase",
    "Row",
    "context_for",
    "parts_for",
    "positions_of",
    "variants_of",
]
