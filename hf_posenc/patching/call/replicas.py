"""Wrappers that run copies of a model in parallel: `nn.DataParallel` and `DistributedDataParallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_posenc.errors import UnsupportedError


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
