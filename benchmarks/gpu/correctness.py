"""Part (a): every scheme on the device is what it is on the CPU in float64.

A result is accepted if its error is below the tolerance of its dtype, or below `_FACTOR` times the error of the CPU in
the same dtype: another order of sums rounds differently, but not more. Beside the error stands the effect: how far the
reference is from that of a model without positions, or for `none` from the model with its own positions. Where the
effect is less than the tolerance, an error in the scheme would not show, and the status of the row says so.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from benchmarks.gpu.checks import CHECKS, LENGTH, LONG, Bench, SkippedError, largest_error
from benchmarks.gpu.part import CANNOT_TELL, OK, SKIPPED, WRONG, Row, Setup
from benchmarks.gpu.plan import FLEX, Case, plan
from benchmarks.gpu.suites import run_suite, suites
from benchmarks.gpu.tiny_models import DECODER, build, tokens

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Of the largest error of a token, relative: some thirty roundings of two tiny layers. The CPU has 3e-6, 0.04 and 0.005
#: for most schemes.
TOLERANCES = {"float32": 5e-5, "bfloat16": 0.06, "float16": 0.01}
_FACTOR = 4.0
#: A smoke run is to show that everything runs.
_SMOKE_LENGTH, _SMOKE_LONG = 24, 80


class Correctness:
    """The first part of the kit.

    Args:
        setup: where and how it is run.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.length, self.long = (_SMOKE_LENGTH, _SMOKE_LONG) if setup.smoke else (LENGTH, LONG)
        torch.set_float32_matmul_precision("highest")

    def settings(self) -> dict[str, Any]:
        """What all rows depend on."""
        return {
            "length": self.length, "long": self.long, "tolerances": TOLERANCES, "factor": _FACTOR,
            "smoke": self.setup.smoke, "device": self.setup.device,
        }  # fmt: skip

    def cells(self) -> list[str]:
        """The checks, and behind them the test suites."""
        return [*(case.name for case in plan(self.setup.smoke)), *suites(self.setup)]

    def run(self, cell: str) -> Row:
        """One check, or the tests of one file."""
        if cell in suites(self.setup):
            return run_suite(cell, self.setup)
        return self._check(Case.of(cell))

    def _check(self, case: Case) -> Row:
        if self.setup.device == "cpu" and case.check == "gradients" and case.back_end == FLEX:
            return {"status": SKIPPED, "reason": "FlexAttention has no backward pass on a CPU"}
        # On a CPU a smoke run leaves out the compiler, which takes half a minute for each function.
        plain = self.setup.smoke and self.setup.device == "cpu"
        # What was compiled for another scheme would count towards the limit of recompilations.
        torch._dynamo.reset()
        model = build(case.kind, case.scheme).to(self.setup.device, _DTYPES[case.dtype])
        model.set_attn_implementation(case.back_end)
        bench = self._bench(case, model, "eager" if plain else "inductor")
        try:
            with torch.compiler.set_stance("force_eager" if plain and case.back_end == FLEX else "default"):
                found, wanted = CHECKS[case.check](bench)
        except SkippedError as reason:
            return {"status": SKIPPED, "reason": str(reason)}
        error = largest_error(found, wanted)
        tolerance = max(TOLERANCES[case.dtype], _FACTOR * self._rounding(case))
        effect = self._effect(case)
        status = (OK if effect > tolerance else CANNOT_TELL) if error <= tolerance else WRONG
        row: Row = {"status": status, "tolerance": _short(tolerance)}
        # JSON has no NaN.
        row |= {"error": None, "reason": "not a number"} if math.isnan(error) else {"error": _short(error)}
        return row | {"effect": _short(effect)}

    def _bench(self, case: Case, model: Any, compiler: str = "inductor", device: str | None = None) -> Bench:
        reference = _reference(case.kind, case.scheme, case.dtype)
        device = self.setup.device if device is None else device
        return Bench(case.kind, model, reference, device, compiler, self.length, self.long)

    def _rounding(self, case: Case) -> float:
        """The error of the CPU in the same dtype, with the plain operations of eager attention."""
        name = case.check if case.check in ("gradients", "long_forward") else "forward"
        return _rounding_on_cpu(self, Case(name, case.kind, case.scheme, case.dtype, "eager"))

    def _effect(self, case: Case) -> float:
        """How far the reference is from what the model would be if the scheme did nothing, or `none` left positions."""
        ids = tokens(self.length)
        uncached = {"use_cache": False} if case.kind == DECODER else {}
        with torch.no_grad():
            mine, other = (
                _reference(case.kind, scheme, case.dtype)(input_ids=ids, **uncached).logits
                for scheme in (case.scheme, None if case.scheme == "none" else "none")
            )
        return largest_error(mine, other)


@functools.lru_cache(maxsize=12)
def _reference(kind: str, scheme: str | None, dtype: str) -> Any:
    """The model on the CPU whose weights are those of `dtype`, and whose arithmetic is that of float64."""
    return build(kind, scheme).to(_DTYPES[dtype]).double()


@functools.lru_cache(maxsize=12)
def _rounding_on_cpu(part: Correctness, case: Case) -> float:
    model = build(case.kind, case.scheme).to(_DTYPES[case.dtype])
    return largest_error(*CHECKS[case.check](part._bench(case, model, device="cpu")))


def _short(number: float) -> float:
    return float(f"{number:.3g}")
