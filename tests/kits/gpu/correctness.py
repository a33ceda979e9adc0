"""The first part: every scheme on the device is what it is on the CPU in float64.

A result is accepted if its error is below the tolerance of its dtype, or below `_FACTOR` times the error of the CPU in
the same dtype: another order of sums rounds differently, but not more. Beside the error stands the effect: how far the
reference is from that of a model without positions, or for `none` from the model with its own positions. Where the
effect is less than the tolerance, an error in the scheme would not show, and the status of the row says so.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.subjects import STOCK
from hf_posenc import get_scheme, list_schemes
from tests.kits.gpu.cells import Part
from tests.kits.gpu.checks import CHECKS, NEED_A_CACHE, Bench, SkippedError, largest_error
from tests.kits.gpu.models import DECODER, ENCODER, build, tokens
from tests.kits.gpu.rows import CANNOT_TELL, OK, SKIPPED, WRONG, Row

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Of the largest error of a token, relative: some thirty roundings of two tiny layers. The CPU has 3e-6, 0.04 and 0.005
#: for most schemes.
TOLERANCES = {"float32": 5e-5, "bfloat16": 0.06, "float16": 0.01}
_FACTOR = 4.0
_FLEX, _FLASH = "flex_attention", "flash_attention_2"
_ALL, _HALF, _USUAL = tuple(_DTYPES), ("bfloat16", "float16"), ("float32", "bfloat16")
#: At least one for each form of a bias, each kind of map, and each way a cache remembers more than keys.
_FIRST = (
    "none", "rope", "alibi", "t5", "forget_gate", "kerple", "sandwich", "sinusoidal", "learned", "xpos", "pope", "shaw",
    "cope", "fire", "ssmax", "self_extend",
)  # fmt: skip
#: A check, its dtypes and its backends. FlashAttention takes half precision only.
Checks = Sequence[tuple[str, Sequence[str], Sequence[str]]]
_EAGER: Checks = (
    ("forward", _ALL, ("eager", "sdpa", _FLASH)),
    ("left_padding", _USUAL, ("eager", "sdpa", _FLASH)),
    ("dynamic_cache", _USUAL, ("eager", "sdpa", _FLASH)),
    ("static_cache", _USUAL, ("eager", "sdpa")),
    ("gradients", _USUAL, ("sdpa", _FLASH)),
    ("gradients_in_blocks", _USUAL, ("sdpa",)),
    ("long_forward", _USUAL, ("sdpa", _FLASH)),
)
_COMPILED: Checks = (
    ("forward", _ALL, (_FLEX,)),
    ("compiled", _USUAL, ("sdpa",)),
    *((check, _USUAL, (_FLEX,)) for check in ("gradients", "long_forward", "left_padding", "dynamic_cache")),
    ("cuda_graphs", _USUAL, ("sdpa",)),
    ("cuda_graphs_static_cache", _USUAL, ("sdpa",)),
)
_COMPILED_FOR_ALL: Checks = (
    ("forward", _USUAL, (_FLEX,)),
    ("compiled", ("float32",), ("sdpa",)),
    ("cuda_graphs_static_cache", ("bfloat16",), ("sdpa",)),
)
_SMOKE: Checks = (
    ("forward", _USUAL, ("eager", "sdpa", _FLEX)),
    *((check, ("float32",), ("sdpa",)) for check in ("left_padding", "dynamic_cache", "static_cache", "gradients")),
    ("long_forward", ("float32",), ("sdpa",)),
)
_SMOKE_COMPILED: Checks = (("compiled", ("float32",), ("sdpa",)), ("cuda_graphs", ("float32",), ("sdpa",)))


class Case(NamedTuple):
    """One check of one model; its cell is its words: "forward model alibi bfloat16 sdpa"."""

    check: str
    kind: str
    scheme: str
    dtype: str
    backend: str


def plan(smoke: bool) -> list[Case]:
    """All cases, the most telling ones first; those that share a model and its reference stand together."""
    if smoke:
        # A compiler takes seconds even where it only traces.
        compiled = _cases(("alibi",), _SMOKE_COMPILED, kinds=(DECODER,))
        return [*_cases(("none", "rope", "alibi", "t5", "forget_gate"), _SMOKE), *compiled]
    rest = [name for name in list_schemes() if name not in _FIRST and not get_scheme(name).combinator]
    eager = [*_cases(_FIRST, _EAGER), *_cases(rest, _EAGER)]
    return [*eager, *_cases(_FIRST, _COMPILED), *_cases(rest, _COMPILED_FOR_ALL)]


def _cases(schemes: Sequence[str], checks: Checks, kinds: Sequence[str] = (DECODER, ENCODER)) -> Iterator[Case]:
    flash = importlib.util.find_spec("flash_attn") is not None
    for scheme in schemes:
        for kind in kinds:
            for dtype in _DTYPES:
                for check, dtypes, backends in checks:
                    if dtype not in dtypes or (kind == ENCODER and check in NEED_A_CACHE):
                        continue
                    for backend in backends:
                        if backend != _FLASH or (flash and dtype in _HALF):
                            yield Case(check, kind, scheme, dtype, backend)


class Correctness(Part):
    """The first part of the kit."""

    # A short input is more than one block of 128 and no multiple of it; a long one is several blocks of any kernel.
    @property
    def _lengths(self) -> tuple[int, int]:
        return (24, 80) if self.smoke else (160, 2304)

    def settings(self) -> dict[str, Any]:
        """What all rows depend on."""
        return {"lengths": self._lengths, "tolerances": TOLERANCES, "factor": _FACTOR}

    def cells(self) -> list[str]:
        """The words of each case."""
        return [" ".join(case) for case in plan(self.smoke)]

    def run(self, cell: str) -> Row:
        """One check."""
        case = Case(*cell.split(" "))
        if self.device == "cpu" and case.check == "gradients" and case.backend == _FLEX:
            return {"status": SKIPPED, "reason": "FlexAttention has no backward pass on a CPU"}
        # On a CPU a smoke run leaves out the compiler, which takes half a minute for each function.
        plain = self.smoke and self.device == "cpu"
        torch.set_float32_matmul_precision("highest")
        # What was compiled for another scheme would count towards the limit of recompilations.
        torch._dynamo.reset()
        model = build(case.kind, case.scheme).to(self.device, _DTYPES[case.dtype])
        model.set_attn_implementation(case.backend)
        bench = _bench(case, model, self.device, self._lengths, "eager" if plain else "inductor")
        try:
            with torch.compiler.set_stance("force_eager" if plain and case.backend == _FLEX else "default"):
                error = largest_error(*CHECKS[case.check](bench))
        except SkippedError as skipped:
            return {"status": SKIPPED, "reason": str(skipped)}
        rounding = {"gradients_in_blocks": "gradients"}.get(case.check, case.check)
        rounding = rounding if rounding in ("gradients", "long_forward") else "forward"
        rounded = _rounding_on_cpu(Case(rounding, *case[1:4], "eager"), self._lengths)
        tolerance = max(TOLERANCES[case.dtype], _FACTOR * rounded)
        effect = self._effect(case)
        row: Row = {"status": OK, "tolerance": _short(tolerance), "effect": _short(effect)}
        # JSON has no NaN.
        row["error"] = None if math.isnan(error) else _short(error)
        if not error <= tolerance:
            reason = f"error {error:.3g}, tolerance {tolerance:.3g}"
            return row | {"status": WRONG, "reason": "not a number" if math.isnan(error) else reason}
        if effect <= tolerance:
            reason = "what the scheme does at this length is less than the tolerance, so no error in it would show"
            return row | {"status": CANNOT_TELL, "reason": reason}
        return row

    def _effect(self, case: Case) -> float:
        """How far the reference is from what the model would be if the scheme did nothing, or `none` left positions."""
        other = _reference(case.kind, STOCK if case.scheme == "none" else "none", case.dtype)
        bench, ids = _bench(case, other, "cpu", self._lengths), tokens(self._lengths[0])
        return largest_error(bench.wanted(ids), bench.found(other, ids))


@functools.lru_cache(maxsize=12)
def _reference(kind: str, scheme: str, dtype: str) -> Any:
    """The model on the CPU whose weights are those of `dtype`, and whose arithmetic is that of float64."""
    return build(kind, scheme).to(_DTYPES[dtype]).double()


@functools.lru_cache(maxsize=12)
def _rounding_on_cpu(case: Case, lengths: tuple[int, int]) -> float:
    """The error of the CPU in the same dtype, with the plain operations of eager attention."""
    model = build(case.kind, case.scheme).to(_DTYPES[case.dtype])
    return largest_error(*CHECKS[case.check](_bench(case, model, "cpu", lengths)))


def _bench(case: Case, model: Any, device: str, lengths: tuple[int, int], compiler: str = "inductor") -> Bench:
    """The model of a case beside its reference."""
    return Bench(case.kind, model, _reference(case.kind, case.scheme, case.dtype), device, compiler, *lengths)


def _short(number: float) -> float:
    return float(f"{number:.3g}")
