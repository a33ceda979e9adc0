"""Several processes or copies of a model: context parallelism, `nn.DataParallel` and `DistributedDataParallel`.

`torch.distributed.tensor.experimental.context_parallel`, and accelerate's `ParallelismConfig(cp_size=...)` with it,
replace `scaled_dot_product_attention`. A layer then sees only the queries and keys of its own process. Schemes that act
before the kernel remain correct if the caller passes the positions of these tokens. A bias would be computed for other
keys than those the kernel attends to.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.refusals import CONTEXT_PARALLELISM

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
            "they are split like the tokens. Patch the model before this context, because patch_model runs it."
        )


@torch.compiler.assume_constant_result
def _is_active() -> bool:
    """Whether sdpa is replaced. Compiled graphs are recompiled when it changes."""
    if _MODULE not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def refuse_replicas() -> Any:
    """Stands in for the method that `nn.DataParallel` uses to copy a stack, and refuses.

    The copies would share the instance-level patches of the original, and therefore run with its weights.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "This model runs under torch.nn.DataParallel, which copies modules without their instance-level patches. "
        "Use DistributedDataParallel instead (`accelerate launch` or `torchrun`)."
    )


def refuse_unsynchronised(parts: nn.Module) -> None:
    """Refuses to train parameters that the `DistributedDataParallel` of the call in progress does not synchronise.

    It synchronises only the parameters that the model had when it was wrapped. A model cannot tell that it is wrapped,
    so the check is made in the first call.

    Args:
        parts: the parts of the scheme in one stack.

    Raises:
        UnsupportedError: if it would not synchronise the gradients of the scheme.
    """
    wrapper = None if torch.compiler.is_compiling() else DistributedDataParallel._active_ddp_module
    if wrapper is None or not torch.is_grad_enabled():
        return
    # The caller may have excluded the parameters of the scheme deliberately.
    names = {name for name in wrapper.parameters_to_ignore if "position_encoding" in name}
    known = {id(weight) for weight in wrapper._module_parameters}
    if not names and any(weight.requires_grad and id(weight) not in known for weight in parts.parameters()):
        raise UnsupportedError(
            "This model was wrapped in DistributedDataParallel before it was patched, so the gradients of the "
            "scheme's parameters would not be synchronised: every process would train its own copy. Call "
            "patch_model before the model is wrapped."
        )
