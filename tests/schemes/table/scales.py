"""Temperatures that depend on position."""

from __future__ import annotations

from .row import Row

ROWS: dict[str, Row] = {}
