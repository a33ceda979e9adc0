"""Adapters that compute the queries of a layer a second time, from phases that a patched model does not have."""

from __future__ import annotations

from torch import nn

from hf_posenc.errors import UnsupportedError


def refuse_recomputed_queries(model: nn.Module) -> None:
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
