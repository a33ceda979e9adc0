"""Biases of distance, one number at a time in double precision."""

from __future__ import annotations

import math
from typing import Any

from . import coordinates


def kerple(config: Any, part: Any, heads: int, causal: bool, head: int, distance: int) -> float:
    """arXiv:2205.09921, section 4, with the floor of the authors' code."""
    floor = config.minimum
    r1 = max(part.r1[head].item(), floor)
    if config.variant == "log":
        return -r1 * math.log(1 + max(part.r2[head].item(), floor) * abs(distance))
    exponent = config.exponent if config.exponent is not None else min(max(part.r2[head].item(), floor), 2.0)
    return -r1 * abs(distance) ** exponent


def fire_bias(part: Any, config: Any, head: int, distance: int, farthest: int) -> float:
    """arXiv:2310.04418, section 3: distance over the farthest position, both compressed, through a small network."""

    def compressed(x: float) -> float:
        return math.log(1 + abs(part.c.item()) * x)

    threshold = abs(part.threshold_factor.item() * config.initial_threshold)
    x = compressed(abs(distance)) / (compressed(max(threshold, farthest)) + config.epsilon)
    total = part.output_bias[head].item()
    for unit in range(config.width):
        total += part.output_weight[head, unit].item() * max(
            0.0, part.hidden_weight[unit].item() * x + part.hidden_bias[unit].item()
        )
    return total


def fire(config: Any, parts: Any, case: Any) -> list[list[list[float]]]:
    logits = case.dot_products()
    length = max(case.positions) + 1
    for head, rows in enumerate(logits):
        for row, query in zip(rows, case.positions, strict=True):
            for column, key in enumerate(case.positions):
                farthest = query if case.causal else length - 1
                row[column] += fire_bias(parts.logit_bias, config, head, key - query, farthest)
    return logits


def swin(config: Any, parts: Any, case: Any) -> list[list[list[float]]]:
    """arXiv:2103.14030, equation 4, for tokens that fill the grid row by row; past the table, its edge."""
    logits = case.dot_products()
    entries = 3 if config.class_entries else 0
    weight = parts.logit_bias.weight.tolist()
    for head, rows in enumerate(logits):
        for row, query in zip(rows, case.positions, strict=True):
            for column, key in enumerate(case.positions):
                without = [one < config.num_prefix_tokens for one in (query, key)]
                if any(without):
                    entry = 2 if all(without) else without.index(True)
                    row[column] += weight[len(weight) - 3 + entry][head] if entries else 0.0
                    continue
                index = 0
                places = [coordinates.place(one, config.grid[1:], config.num_prefix_tokens) for one in (query, key)]
                for here, there, size in zip(*places, config.grid, strict=True):
                    index = index * (2 * size - 1) + min(max(here - there + size - 1, 0), 2 * size - 2)
                row[column] += weight[index][head]
    return logits
