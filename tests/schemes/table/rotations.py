"""Maps of queries and keys beyond RoPE."""

from __future__ import annotations

from .row import Row

ROWS: dict[str, Row] = {}
