"""Refusing models in which no scheme can be placed."""

from __future__ import annotations

import sys
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.entry import REMOTE_CODE
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.module_sites import RotaryModuleSite
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.schemes.refusals import ADAPTION_PROMPTS, SHARDED_WEIGHTS

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


def is_part(model: PreTrainedModel) -> bool:
    """Whether a model cannot be saved separately: an encoder or a decoder that transformers does not export."""
    name = type(model).__name__
    return type(model).__module__.startswith("transformers.models.") and not hasattr(transformers, name)


def refuse_remote_code(model: PreTrainedModel) -> None:
    """Refuses a model that was exported to "remote_code": its file has replaced the positions of the stock class.

    Raises:
        UnsupportedError: saying what to load instead.
    """
    if (parts := getattr(model.config, REMOTE_CODE, None)) is not None:
        raise UnsupportedError(
            f"This {type(model).__name__} runs the code of an export, with the positions {parts['scheme']!r}. They "
            "cannot be exchanged or exported again. Load the checkpoint that was exported, or the stock model, and "
            "patch that."
        )


def _refuse_part(model: PreTrainedModel) -> None:
    if is_part(model):
        raise UnsupportedError(
            f"{type(model).__name__} is a part of a model and is saved with it, so a scheme in this part alone would "
            "be lost. Patch the whole model (the options `layers` and `elsewhere` choose layers; in a model "
            "of several modalities, `part` chooses the part)."
        )


def _refuse_recomputed_queries(model: nn.Module) -> None:
    """Refuses a model with adaption prompts whose queries are rotated."""
    for module in model.modules():
        kind = type(module)
        if (kind.__module__, kind.__name__) == ("peft.tuners.adaption_prompt.layer", "AdaptedAttention"):
            raise UnsupportedError(
                f"{_PROMPTS}, so the scheme of this {type(model).__name__} cannot change under them. Patch the model "
                "before they are made, or remove them (delete_adapter of the PeftModel, for each adapter) and patch "
                "the model inside (peft_model.base_model.model)."
            )


def follow_in_prompts(model: PreTrainedModel, encoding: PositionEncoding, is_native: bool) -> None:
    """Gives the adaption prompts of a patched model, which have no positions, the phases of its queries.

    Args:
        model: the model that gets the prompts.
        encoding: the scheme in force.
        is_native: whether it is the native one.

    Raises:
        UnsupportedError: if the scheme rotates queries in another way than the stock model.
    """
    sites = [site for site in encoding.record.journal.forwards() if isinstance(site, RotaryModuleSite)]
    if sites and not is_native:
        ADAPTION_PROMPTS.refuse(encoding.needs(), encoding.label)
    for site in sites:
        site.neutral, site.unused = not is_native, site.unused and not is_native


_PROMPTS = (
    "PEFT's adaption prompts (Llama-Adapter) compute the queries of a layer a second time and rotate them with the "
    "phases of the stock model"
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
    SHARDED_WEIGHTS.refuse(encoding.needs(), encoding.label)


def _is_sharded(model: nn.Module) -> bool:
    if _FSDP not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
