"""Context parallelism: each process holds some of the tokens of a sequence, and torch exchanges keys inside sdpa.

`torch.distributed.tensor.experimental.context_parallel`, and accelerate's `ParallelismConfig(cp_size=...)` with it,
replace `scaled_dot_product_attention`. A layer then sees only the queries and keys of its own process. Schemes that act
before the kernel remain correct if the caller passes the positions of these tokens. A bias would be computed for other
keys than those the kernel attends to.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.environments import CONTEXT_PARALLELISM

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


def refuse_context_parallel(problem: str, position_ids: Any, implementation: str | None) -> None:
    """Refuses a context-parallel call in which the positions of tokens or keys are unknown.

    Args:
        problem: why the scheme cannot run there; empty if it can.
        position_ids: as passed by the caller, or `None`.
        implementation: name of the model's attention implementation.

    Raises:
        UnsupportedError: inside `context_parallel`, if there is a problem, if the attention is not sdpa, or if there
            are no `position_ids`.
    """
    if not _is_active():
        return
    if problem:
        raise UnsupportedError(CONTEXT_PARALLELISM.message(problem, "this scheme"))
    if implementation != "sdpa":
        raise UnsupportedError(
            "Context parallelism splits the tokens of this sequence across processes and exchanges keys inside sdpa "
            f"only, but this model uses {implementation!r}. Call model.set_attn_implementation('sdpa')."
        )
    if position_ids is None:
        raise UnsupportedError(
            "Context parallelism splits the tokens of this sequence across processes, and the positions of the tokens "
            "of this process are unknown. Pass position_ids, and add them to the buffers of context_parallel, so that "
            "they are split like the tokens."
        )


@torch.compiler.assume_constant_result
def _is_active() -> bool:
    """Whether sdpa is replaced. Compiled graphs are recompiled when it changes."""
    if _MODULE not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers
