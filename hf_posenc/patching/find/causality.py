"""Whether the queries of a layer see only keys at or before them, as a model states it."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.patching.find.architectures import Architecture


def is_causal(module: nn.Module, stack: PreTrainedModel, architecture: Architecture) -> bool:
    """What a declaration says, else the stack and the attention module.

    An attention module whose `is_causal` is false may be causal all the same, by the mask it is given: those in the
    decoders of NLLB-MoE and BigBird-Pegasus, and of UMT5 before transformers 5.18. So a stack that is a decoder
    decides. `refuse_misread_causality` checks such contradictions by running the model.
    """
    if architecture.causal is not None:
        return architecture.causal(stack.config) if callable(architecture.causal) else architecture.causal
    own = getattr(module, "is_causal", None)
    if own is True or _is_decoder(stack):
        return True
    if own is False or "Encoder" in type(stack).__name__:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return stack.config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _is_decoder(stack: PreTrainedModel) -> bool:
    stated = getattr(stack.config, "is_decoder", False) or getattr(stack, "is_decoder", False)
    return bool(stated) or "Decoder" in type(stack).__name__
