"""LoRA for patched models."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.patching.place.model_checks import unwrapped
from hf_posenc.recipes.gradual import freeze_old


def add_lora(model: nn.Module, config: Any) -> Any:
    """Adds LoRA adapters to a patched model and makes the scheme's parameters trainable.

    PEFT freezes all other parameters. A scheme's parameters are few and new, so they are trained in full; in a blend,
    only those of the new scheme. `save_pretrained` writes the adapters and, next to them, the scheme with its
    parameters. `merge_and_unload()` returns an ordinary patched model with both.

    Args:
        model: a patched model.
        config: a `peft.LoraConfig`.

    Returns:
        The `peft.PeftModel`.

    Raises:
        UnsupportedError: for a model that is not patched, for which PEFT alone is enough.
    """
    from peft import get_peft_model

    encoding = current_encoding(unwrapped(model))
    if encoding is None:
        raise UnsupportedError(
            "This model has no scheme to train. Call swap_scheme or patch_model first, or use peft.get_peft_model "
            "for adapters alone."
        )
    trained = [parameter for parameter in encoding.parameters() if parameter.requires_grad]
    wrapped = get_peft_model(model, config)
    for parameter in trained:
        parameter.requires_grad_(True)
    freeze_old(encoding)
    return wrapped
