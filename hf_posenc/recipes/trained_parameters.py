"""The parameters of a scheme in training: with LoRA adapters, and in groups with and without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.installation import require
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.recipes.gradual import freeze_old
from hf_posenc.schemes.parts import Part


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
    require("Adapters", "peft")
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


def undecayed_scheme_parameters(model: nn.Module) -> set[str]:
    """Returns the names of the scheme's parameters that its paper trains without weight decay."""
    parts = ((path, module) for path, module in model.named_modules() if isinstance(module, Part))
    weights = ((path, name, part._parameters.get(name)) for path, part in parts for name in part.no_weight_decay)
    return {f"{path}.{name}".lstrip(".") for path, name, weight in weights if weight is not None}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the parameter groups of `transformers.Trainer`, with the weight decay of the scheme's paper for its
    parameters.

    Trainer chooses the parameters to decay by name and does not know about schemes, so pass it the optimizer:
    `Trainer(..., optimizers=(torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-4), None))`.

    Args:
        model: patched or not.
        weight_decay: weight decay of the decayed parameters.

    Returns:
        Two groups, the decayed and the undecayed parameters; frozen ones are in neither.
    """
    from transformers import Trainer

    unused: Any = None  # The method does not read its Trainer.
    decayed = set(Trainer.get_decay_parameter_names(unused, model)) - undecayed_scheme_parameters(model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trained if name not in decayed], "weight_decay": 0.0},
    ]
