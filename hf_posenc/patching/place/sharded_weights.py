"""Models that FSDP2 or DDP has prepared already, into which parameters of a scheme would come too late."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.place.encoding import PositionEncoding

_MODULE = "torch.distributed.fsdp"


def refuse_late_parameters(model: nn.Module, encoding: PositionEncoding) -> None:
    """Refuses to give parameters to a model that `fully_shard` has sharded.

    FSDP2 knows the parameters that a module had when it was sharded. Later ones would stay whole, be drawn anew in each
    process, and be trained there with the gradients of its own part of the batch.

    Raises:
        UnsupportedError: for a scheme with parameters.
    """
    if not _is_sharded(model) or all(hasattr(weight, "device_mesh") for weight in encoding.parameters()):
        return
    raise UnsupportedError(
        f"The weights of this {type(model).__name__} are sharded by FSDP2 already, and the scheme "
        f"{encoding.config.name!r} has parameters, which it would not shard and whose gradients it would not add up. "
        "Call patch_model before fully_shard, or save the patched model and load that with its distributed_config."
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


def _is_sharded(model: nn.Module) -> bool:
    if _MODULE not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
