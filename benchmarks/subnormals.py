"""Whether a processor is slow with subnormal numbers, which attention with a strongly negative bias is full of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

#: Above this ratio, schemes whose biases decay are measured slower than they are elsewhere.
SLOW = 3.0
#: A square matrix of so many rows stays in the caches of any processor.
_ROWS = 192
_TIMES = 15


def subnormal_ratio() -> float:
    """How many times as long a processor takes for subnormal float32 numbers as for normal ones.

    The slower of a multiplication and a matrix product, each the fastest of some runs. The operators are those that
    meet `exp` of a large negative logit in attention. An exponential itself would tell more of torch's mathematical
    library than of the processor.
    """
    half, normal, subnormal = (torch.full((_ROWS, _ROWS), value) for value in (0.5, 0.25, 1e-40))
    out = torch.empty(_ROWS, _ROWS)
    return max(
        _fastest(lambda: torch.mul(subnormal, half, out=out)) / _fastest(lambda: torch.mul(normal, half, out=out)),
        _fastest(lambda: torch.mm(subnormal, half, out=out)) / _fastest(lambda: torch.mm(normal, half, out=out)),
    )


def subnormal_line(ratio: float) -> str:
    """One sentence for a table, and a warning where the ratio is large."""
    told = f"Subnormal float32 numbers take {ratio:.1f} times as long as normal ones on this processor."
    if ratio <= SLOW:
        return told
    return (
        f"**{told} Biases that decay make such numbers, so on a CPU of this kind they cost more than elsewhere.** "
        "Quote the processor with every figure."
    )


def _fastest(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
