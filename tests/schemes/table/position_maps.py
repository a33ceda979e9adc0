"""Other positions for a scheme."""

from __future__ import annotations

from .row import Row

ROWS: dict[str, Row] = {}
