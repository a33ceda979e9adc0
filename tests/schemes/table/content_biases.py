"""Biases that read queries, keys or hidden states."""

from __future__ import annotations

from .row import Row

ROWS: dict[str, Row] = {}
