"""Biases that read absolute positions, in plain Python from the papers, one pair at a time."""

from __future__ import annotations

import math
from typing import Any

from ..table.row import LogitCase, dot
from .content_biases import Logits, add_to_dot_products


def tupe(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2006.15595, eq. 7 and 10: words with words, and positions with positions."""
    bias_part = parts.logit_bias
    head_dim = len(case.query[0][0])

    def normalised(row: int) -> list[float]:
        vector = bias_part.weight[row].tolist()
        mean = sum(vector) / len(vector)
        variance = sum((value - mean) ** 2 for value in vector) / len(vector)
        weights, offsets = bias_part.norm_weight.tolist(), bias_part.norm_bias.tolist()
        scaled = [(value - mean) / math.sqrt(variance + 1e-5) for value in vector]
        return [value * weight + offset for value, weight, offset in zip(scaled, weights, offsets, strict=True)]

    def product(head: int, query_row: int, key_row: int) -> float:
        total = 0.0
        for component in range(head * head_dim, (head + 1) * head_dim):
            one = dot(bias_part.query_weight[component].tolist(), normalised(query_row))
            other = dot(bias_part.key_weight[component].tolist(), normalised(key_row))
            total += (one + float(bias_part.query_bias[component])) * (other + float(bias_part.key_bias[component]))
        return total / math.sqrt(head_dim)

    def bias(head: int, query: int, key: int) -> float:
        if config.reset_first and case.positions[query] == 0:
            return product(head, 0, 0)
        if config.reset_first and case.positions[key] == 0:
            return product(head, 1, 1)
        return product(head, 1 + case.positions[query], 1 + case.positions[key])

    rows = add_to_dot_products(case, bias)
    return [[[logit / math.sqrt(2) for logit in logits] for logits in head] for head in rows]
