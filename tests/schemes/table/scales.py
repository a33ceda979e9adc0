"""Temperatures, one query at a time in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hf_posenc.schemes.scale.llama4_scale import Llama4ScaleConfig
from hf_posenc.schemes.scale.log_n_scale import LogNScaleConfig
from hf_posenc.schemes.scale.ssmax import SSMaxConfig

from .row import LogitCase, Logits, Row


def scaled(case: LogitCase, factor: Callable[[int, int], float]) -> Logits:
    """All logits of a query times the factor of its head and of the number of keys it sees."""
    length = max(case.positions) + 1
    return case.logits(
        lambda head, i, j: factor(head, case.positions[i] + 1 if case.causal else length) * case.product(head, i, j)
    )


def ssmax(config: Any, parts: Any, case: LogitCase) -> Logits:
    """arXiv:2501.19399."""
    scale, bias = parts.logit_scale.scale.tolist(), parts.logit_scale.bias
    offsets = [0.0] * len(case.query) if bias is None else bias.tolist()
    return scaled(case, lambda head, n: scale[head] * math.log(n) + offsets[head])


def log_n(config: Any, parts: Any, case: LogitCase) -> Logits:
    """kexue.fm/archives/8823: the logarithm to the base of the training length, 64 in the tests' models."""

    def factor(head: int, n: int) -> float:
        base = math.log(n, config.training_length or 64)
        if config.yarn_weight is not None:  # arXiv:2309.00071, section 3.4: 1 / t
            return (1 + config.yarn_weight * math.log(max(1.0, n / (config.training_length or 64)))) ** 2
        return max(base, 1.0) if config.clamp else base

    return scaled(case, factor)


def llama4(config: Any, parts: Any, case: LogitCase) -> Logits:
    """The temperature of Llama 4 (offset 1) and Ministral 3 (offset 0); n keys end at position n - 1."""

    def factor(head: int, n: int) -> float:
        steps = (n - 1 + config.offset) // config.floor_scale
        return 1 + config.attention_scale * math.log(1 + steps)

    return scaled(case, factor)


ROWS: dict[str, Row] = {
    "ssmax": Row(
        "logits",
        ssmax,
        (SSMaxConfig(), SSMaxConfig(bias=True), SSMaxConfig(initial_scale=0.43), SSMaxConfig(training_length=16)),
        marks="--+.++..-++",
        # The factor of the query at i follows log(i + 1): a number of its own, which half precision rounds together.
        causal_marks="++-.++..---",
    ),
    "log_n_scale": Row(
        "logits",
        log_n,
        (
            LogNScaleConfig(4),
            LogNScaleConfig(20, clamp=False),
            LogNScaleConfig(clamp=False),
            LogNScaleConfig(4, yarn_weight=0.3),
        ),
        marks="--+.++..-++",
        # Clamped: 1 for every position up to the training length.
        causal_marks="-+-.++..---",
    ),
    "llama4_scale": Row(
        "logits",
        llama4,
        (Llama4ScaleConfig(floor_scale=4), Llama4ScaleConfig(0.5, 7, offset=0)),
        everywhere=True,
        marks="--+.++..-++",
        # One factor for each 8192 positions: few numbers, and none that rounding joins.
        causal_marks="-+-.++..-++",
    ),
}
