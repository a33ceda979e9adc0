"""Refusing models in which no scheme can be placed."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.place.encoding import PositionEncoding

_FSDP = "torch.distributed.fsdp"


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, without a PEFT model around it.

    Raises:
        TypeError: for anything else.
        UnsupportedError: if no scheme can be placed in the model.
    """
    base: Any = getattr(model, "get_base_model", None)
    inner = model if base is None else base()
    if isinstance(inner, PreTrainedModel):
        _refuse_part(inner)
        _refuse_recomputed_queries(inner)
    else:
        advice = (
            "Load it first, for example with AutoModel.from_pretrained."
            if isinstance(inner, str)
            else "Patch the model before it is wrapped (DistributedDataParallel, torch.compile), or pass the model "
            "inside the wrapper."
        )
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(inner).__name__}. {advice}")
    return inner


def _refuse_part(model: PreTrainedModel) -> None:
    """Refuses encoders and decoders that cannot be saved separately, because transformers does not export them."""
    import transformers

    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models.") or hasattr(transformers, name):
        return
    raise UnsupportedError(
        f"{name} is a part of a model and is saved with it, so a scheme in this part alone would be lost. Patch the "
        "whole model (`layers=` and `elsewhere=` choose layers; in a model of several modalities, `part=` chooses the "
        "part)."
    )


def _refuse_recomputed_queries(model: nn.Module) -> None:
    """Refuses a model with adaption prompts.

    Raises:
        UnsupportedError: with the reason.
    """
    for module in model.modules():
        if type(module).__module__ == "peft.tuners.adaption_prompt.layer":
            raise recomputed_queries_error(model)


def recomputed_queries_error(model: nn.Module) -> UnsupportedError:
    """The refusal of adaption prompts and a scheme in one model."""
    return UnsupportedError(
        "PEFT's adaption prompts (Llama-Adapter) compute the queries of a layer a second time and rotate them with the "
        f"stock phases, which a {type(model).__name__} with another position encoding does not have. Use LoRA, prompt "
        "tuning or prefix tuning."
    )


def refuse_late_parameters(model: nn.Module, encoding: PositionEncoding) -> None:
    """Refuses to add parameters to a model that `fully_shard` has sharded.

    FSDP2 manages the parameters that a module had when it was sharded. Parameters added later would not be sharded:
    each process would initialise its own and train them on its part of the batch only.

    Raises:
        UnsupportedError: if the scheme has parameters that are not sharded.
    """
    if not _is_sharded(model) or all(hasattr(weight, "device_mesh") for weight in encoding.parameters()):
        return
    raise UnsupportedError(
        f"FSDP2 has already sharded the weights of this {type(model).__name__}, and the scheme "
        f"{encoding.config.name!r} has parameters, which FSDP2 would not shard and whose gradients it would not "
        "reduce. Call patch_model before fully_shard, or save the patched model and load it with its "
        "distributed_config."
    )


def _is_sharded(model: nn.Module) -> bool:
    if _FSDP not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
