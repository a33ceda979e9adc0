"""Biases that read absolute positions, in plain Python from the papers, one pair at a time."""

from __future__ import annotations

import functools
import math
from typing import Any

from hf_posenc.schemes.bias.tupe import TupeConfig

from .row import LogitCase, Logits, Row, dot


def tupe(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2006.15595, eq. 7 and 10: words with words, and positions with positions."""
    bias_part = parts.logit_bias
    head_dim = len(case.query[0][0])

    weights, offsets = bias_part.norm_weight.tolist(), bias_part.norm_bias.tolist()

    @functools.cache
    def projected(row: int, of_queries: bool) -> list[float]:
        vector = bias_part.weight[row].tolist()
        mean = sum(vector) / len(vector)
        variance = sum((value - mean) ** 2 for value in vector) / len(vector)
        scaled = [(value - mean) / math.sqrt(variance + 1e-5) for value in vector]
        normalised = [value * weight + offset for value, weight, offset in zip(scaled, weights, offsets, strict=True)]
        matrix, shift = (
            (bias_part.query_weight, bias_part.query_bias) if of_queries else (bias_part.key_weight, bias_part.key_bias)
        )
        return [dot(line, normalised) + offset for line, offset in zip(matrix.tolist(), shift.tolist(), strict=True)]

    def product(head: int, query_row: int, key_row: int) -> float:
        components = slice(head * head_dim, (head + 1) * head_dim)
        return dot(projected(query_row, True)[components], projected(key_row, False)[components]) / math.sqrt(head_dim)

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
