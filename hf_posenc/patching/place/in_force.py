"""The encodings in force in a model, and checks that its layers use them."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.placed_forward import forward_on_instance
from hf_posenc.patching.place.encoding import PositionEncoding


def encodings(model: nn.Module) -> list[PositionEncoding]:
    """Every encoding in a model. There are several if parts of the model were patched separately.

    Raises:
        UnsupportedError: if an encoding was created by another copy of this package.
    """
    return [module for module in model.modules() if _is_encoding(module, model)]


def _is_encoding(module: nn.Module, model: nn.Module) -> TypeGuard[PositionEncoding]:
    if isinstance(module, PositionEncoding):
        return True
    name = (PositionEncoding.__module__, PositionEncoding.__qualname__)
    if any((kind.__module__, kind.__qualname__) == name for kind in type(module).__mro__):
        package = __name__.partition(".")[0]
        raise UnsupportedError(
            f"This {type(model).__name__} was patched by another copy of {package}: the package has been imported "
            "again in this process, after its modules were removed from sys.modules (test plugins and notebooks do "
            "so). The new copy cannot undo or save the changes of the old one. Load and patch the model again, or "
            f"restart the process, and exclude {package} from reloading."
        )
    return False


def current_encoding(model: PreTrainedModel) -> PositionEncoding | None:
    """The encoding in force, or `None` for a stock model.

    Raises:
        UnsupportedError: if a part of the model was patched on its own.
    """
    found = encodings(model)
    for encoding in found:
        if encoding.__dict__.get("holder") is not model.base_model:
            raise UnsupportedError(
                f"A part of this {type(model).__name__} was patched on its own with {encoding.config.name!r}. Call "
                "unpatch_model on that part first, because a scheme is placed in a whole model."
            )
    return found[0] if found else None


def has_patched_layers(model: nn.Module) -> bool:
    """Whether any attention layer of a model is patched, including layers shared with another model."""
    placed = [site for encoding in encodings(model) for site in encoding.record.journal.forwards()]
    shared = [forward_on_instance(module) for module in model.modules()]
    return any(isinstance(forward, AttentionSite) for forward in (*placed, *shared))


def refuse_changed(model: PreTrainedModel) -> None:
    """Refuses to save a patched model that is not what was placed.

    Raises:
        UnsupportedError: naming the first difference.
    """
    for encoding in encodings(model):
        problem = encoding.record.agrees(model)
        if problem:
            raise UnsupportedError(f"This {type(model).__name__} is not saved: {problem}")
