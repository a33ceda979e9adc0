"""Low-rank adaptation of a model with another scheme."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.place.in_force import current_encoding
from hf_posenc.patching.place.refusals import unwrapped
from hf_posenc.recipes.gradual import all_parts
from hf_posenc.schemes.arrangement.blended import BlendedPart


def add_lora(model: nn.Module, config: Any) -> Any:
    """Puts LoRA adapters around a patched model and trains the scheme's own parameters beside them.

    PEFT freezes whatever it does not know. A scheme's parameters are few and new, so they are trained as they are; of a
    blend only those of the new scheme. `save_pretrained` writes the adapters, and the scheme with its parameters beside
    them; `merge_and_unload()` gives an ordinary patched model, which has both.

    Args:
        model: patched.
        config: a `peft.LoraConfig`.

    Returns:
        The `peft.PeftModel`.

    Raises:
        UnsupportedError: for a model that is not patched, whose adapters peft alone can make.
    """
    from peft import get_peft_model

    encoding = current_encoding(unwrapped(model))
    if encoding is None:
        raise UnsupportedError(
            "This model has no scheme to train beside its adapters. Call swap_scheme or patch_model first, or "
            "peft.get_peft_model for adapters alone."
        )
    trained = [parameter for parameter in encoding.parameters() if parameter.requires_grad]
    wrapped = get_peft_model(model, config)
    for parameter in trained:
        parameter.requires_grad_(True)
    leaving = [part.old for part in all_parts(encoding) if isinstance(part, BlendedPart) and part.old is not None]
    for part in leaving:
        part.requires_grad_(False)
    return wrapped
