"""Context parallelism: each process holds some of the tokens of a sequence, and torch exchanges keys inside sdpa.

`torch.distributed.tensor.experimental.context_parallel`, and accelerate's `ParallelismConfig(cp_size=...)` with it,
replace `scaled_dot_product_attention`. A layer then sees the queries and keys of its own process only. What acts before
the kernel is right where the caller says which positions these tokens have; a bias would meet other keys than the
kernel does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.parts import LogitBias, Part

_FLAGS = ("length_dependent", "needs_whole_sequence")
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


def needs_all_tokens(parts: Iterable[Part]) -> str:
    """Why a scheme is wrong where a process sees some tokens with their true positions; empty where it is right."""
    for part in parts:
        name = type(part).__name__
        if isinstance(part, LogitBias):
            return f"{name} would be computed for the keys of this process alone, while attention reads those of all"
        if any(getattr(module, flag, False) for module in part.modules() for flag in _FLAGS):
            return f"{name} goes by all tokens of a sequence"
    return ""


def refuse_context_parallel(reason: str, position_ids: Any, implementation: str | None) -> None:
    """Refuses a call in which a process cannot know where its tokens stand, or where keys do.

    Args:
        reason: why the scheme needs all tokens of a sequence; empty where it does not.
        position_ids: as the caller gave them, or `None`.
        implementation: the attention function of the model.

    Raises:
        UnsupportedError: inside `context_parallel`, unless positions are given and enough.
    """
    if not _is_active():
        return
    if reason:
        raise UnsupportedError(
            f"Context parallelism has dealt the tokens of this sequence out to several processes, and {reason}. Use a "
            "scheme that acts on embeddings or rotates (sinusoidal, rope, p_rope, ...), or train without it."
        )
    if implementation != "sdpa":
        raise UnsupportedError(
            "Context parallelism has dealt the tokens of this sequence out to several processes, whose keys sdpa alone "
            f"exchanges, and this model runs {implementation!r}. Call model.set_attn_implementation('sdpa')."
        )
    if position_ids is None:
        raise UnsupportedError(
            "Context parallelism has dealt the tokens of this sequence out to several processes, and nothing says "
            "where those of this process stand. Pass position_ids, and name them among the buffers of "
            "context_parallel, so that they are dealt out like the tokens."
        )


@torch.compiler.assume_constant_result
def _is_active() -> bool:
    """Whether sdpa is replaced. A compiled graph asks again, because the function it has called is another one then."""
    if _MODULE not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers
