"""Wrappers that run copies of a model in parallel: `nn.DataParallel` and `DistributedDataParallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_posenc.errors import UnsupportedError


class RefuseReplicas:
    """Stands in for the method by which `nn.DataParallel` copies a stack.

    The copies would share the original's instance-level patches, and run its weights.
    """

    def __call__(self) -> Any:
        """Copies nothing.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "This model runs under torch.nn.DataParallel, which copies modules without their instance-level patches. "
            "Use DistributedDataParallel instead (`accelerate launch` or `torchrun`)."
        )


class ReplicasCheck:
    """Refuses to train parameters that `DistributedDataParallel` does not know.

    It knows those that a model had when it was wrapped. A model does not say that it is wrapped, so this is noticed in
    the first call.

    Args:
        parts: of the scheme in one stack.
    """

    def __init__(self, parts: nn.Module) -> None:
        self.parts = parts

    def check(self) -> None:
        """Looks at the wrapper that is calling.

        Raises:
            UnsupportedError: if it would leave out gradients of the scheme.
        """
        wrapper = None if torch.compiler.is_compiling() else DistributedDataParallel._active_ddp_module
        if wrapper is None or not torch.is_grad_enabled():
            return
        # Those that the caller has named to be left out are left out.
        names = {name for name in wrapper.parameters_to_ignore if "position_encoding" in name}
        known = {id(weight) for weight in wrapper._module_parameters}
        if not names and any(weight.requires_grad and id(weight) not in known for weight in self.parts.parameters()):
            raise UnsupportedError(
                "This model was wrapped in DistributedDataParallel before its scheme was placed, and the scheme has "
                "parameters, whose gradients would not be added up: each process would train its own. Call "
                "patch_model before the model is wrapped."
            )
