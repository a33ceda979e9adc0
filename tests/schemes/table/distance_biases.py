"""Biases that are functions of distance or position."""

from __future__ import annotations

from .row import Row

ROWS: dict[str, Row] = {}
