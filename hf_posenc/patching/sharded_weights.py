"""Models whose weights FSDP2 has split already, into which parameters of a scheme would come too late."""

from __future__ import annotations

import sys

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.encoding import PositionEncoding

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


def _is_sharded(model: nn.Module) -> bool:
    if _MODULE not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
