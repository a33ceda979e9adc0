"""Biases that read absolute positions, from the papers, in double precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hf_posenc.schemes.bias.tupe import TupeConfig

from .row import LogitCase, Logits, Row


def tupe(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2006.15595, eq. 7 and 10: words with words, and positions with positions."""
    part = parts.logit_bias
    head_dim = len(case.query[0][0])
    rows = np.array(part.weight.tolist())
    rows = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
    rows = rows * part.norm_weight.tolist() + part.norm_bias.tolist()
    queries = rows @ np.array(part.query_weight.tolist()).T + part.query_bias.tolist()
    keys = rows @ np.array(part.key_weight.tolist()).T + part.key_bias.tolist()

    def product(head: int, query_row: int, key_row: int) -> float:
        components = slice(head * head_dim, (head + 1) * head_dim)
        return float(queries[query_row, components] @ keys[key_row, components]) / math.sqrt(head_dim)

    def bias(head: int, query: int, key: int) -> float:
        if config.reset_first and case.positions[query] == 0:
            return product(head, 0, 0)
        if config.reset_first and case.positions[key] == 0:
            return product(head, 1, 1)
        return product(head, 1 + case.positions[query], 1 + case.positions[key])

    return case.logits(lambda head, i, j: (case.product(head, i, j) + bias(head, i, j)) / math.sqrt(2))


ROWS: dict[str, Row] = {
    "tupe": Row(
        "logits",
        tupe,
        (TupeConfig(reset_first=False), TupeConfig(reset_first=True), TupeConfig(num_positions=60, reset_first=False)),
        marks="++-.-+..---",
        causal_marks="++-.-+..--+",
        reach=(64, 64, 60),
    ),
}
