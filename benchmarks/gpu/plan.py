"""Which checks are run, the most telling ones first."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.checks import NEED_A_CACHE
from benchmarks.gpu.tiny_models import DECODER, ENCODER
from hf_posenc import get_scheme, list_schemes

FLEX = "flex_attention"
_FLASH = "flash_attention_2"
_HALF = ("bfloat16", "float16")
_USUAL = ("float32", "bfloat16")
#: At least one for each form of a bias, each kind of map, and each way a cache remembers more than keys.
_FIRST = (
    "none", "rope", "alibi", "t5", "forget_gate", "kerple", "sandwich", "sinusoidal", "learned", "xpos", "pope", "shaw",
    "cope", "fire", "ssmax", "self_extend",
)  # fmt: skip
#: Without a compiler: a check, its dtypes and its back-ends. FlashAttention takes half precision only.
_EAGER: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
    ("forward", ("float32", *_HALF), ("eager", "sdpa", _FLASH)),
    ("left_padding", _USUAL, ("eager", "sdpa", _FLASH)),
    ("dynamic_cache", _USUAL, ("eager", "sdpa", _FLASH)),
    ("static_cache", _USUAL, ("eager", "sdpa")),
    ("gradients", _USUAL, ("sdpa", _FLASH)),
    ("long_forward", _USUAL, ("sdpa", _FLASH)),
)
_COMPILED: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
    ("forward", ("float32", *_HALF), (FLEX,)),
    ("compiled", _USUAL, ("sdpa",)),
    ("gradients", _USUAL, (FLEX,)),
    ("long_forward", _USUAL, (FLEX,)),
    ("left_padding", _USUAL, (FLEX,)),
    ("dynamic_cache", _USUAL, (FLEX,)),
    ("static_cache", ("float32",), (FLEX,)),
    ("cuda_graphs", _USUAL, ("sdpa",)),
    ("cuda_graphs_static_cache", _USUAL, ("sdpa",)),
)
_COMPILED_FOR_ALL: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
    ("forward", _USUAL, (FLEX,)),
    ("compiled", ("float32",), ("sdpa",)),
    ("cuda_graphs_static_cache", ("bfloat16",), ("sdpa",)),
)
_SMOKE: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
    ("forward", _USUAL, ("eager", "sdpa", FLEX)),
    *((check, ("float32",), ("sdpa",)) for check in ("left_padding", "dynamic_cache", "static_cache", "gradients")),
    ("long_forward", ("float32",), ("sdpa",)),
)
_SMOKE_COMPILED: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
    ("compiled", ("float32",), ("sdpa",)),
    ("cuda_graphs", ("float32",), ("sdpa",)),
)


@dataclass(frozen=True)
class Case:
    """One check of one model; its name is that of its cell."""

    check: str
    kind: str
    scheme: str
    dtype: str
    back_end: str

    @property
    def name(self) -> str:
        """Such as "forward decoder alibi bfloat16 sdpa"."""
        return f"{self.check} {self.kind} {self.scheme} {self.dtype} {self.back_end}"

    @classmethod
    def of(cls, name: str) -> Case:
        """The case of a name."""
        return cls(*name.split(" "))


def plan(smoke: bool) -> list[Case]:
    """All cases; those that share a model and its reference stand together."""
    if smoke:
        # A compiler takes seconds even where it only traces.
        compiled = [case for case in _cases(("alibi",), _SMOKE_COMPILED) if case.kind == DECODER]
        return [*_cases(("none", "rope", "alibi", "t5", "forget_gate"), _SMOKE), *compiled]
    known = [name for name in list_schemes() if not get_scheme(name).combinator]
    first = [name for name in _FIRST if name in known]
    rest = [name for name in known if name not in first]
    cases = [*_cases(first, _EAGER), *_cases(first, _COMPILED), *_cases(rest, _EAGER), *_cases(rest, _COMPILED_FOR_ALL)]
    return list(dict.fromkeys(cases))


def _cases(schemes: Sequence[str], checks: Sequence[tuple[str, Sequence[str], Sequence[str]]]) -> Iterator[Case]:
    flash = importlib.util.find_spec("flash_attn") is not None
    for scheme in schemes:
        for kind in (DECODER, ENCODER):
            for dtype in ("float32", *_HALF):
                for check, dtypes, back_ends in checks:
                    if dtype not in dtypes or (kind == ENCODER and check in NEED_A_CACHE):
                        continue
                    for back_end in back_ends:
                        if back_end != _FLASH or (flash and dtype in _HALF):
                            yield Case(check, kind, scheme, dtype, back_end)
