"""Models of images and sound, of which a program for text would lose a part."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import model_parts
from hf_posenc.patching.anatomy.parts import TEXT, default_part
from hf_posenc.patching.place.encoding import current_encoding, parts_named


def other_modalities(model: PreTrainedModel) -> list[str]:
    """The parts of a model that read something else than text."""
    try:
        return [part for part in model_parts(model) if part != TEXT]
    except UnsupportedError:
        return []  # A model without attention has no parts.


def refuse_lost_modalities(model: PreTrainedModel, target: str) -> None:
    """Refuses a model of images or sound, for targets that write a program for token ids.

    Raises:
        UnsupportedError: saying what can be exported instead.
    """
    others = other_modalities(model)
    if not others:
        return
    name = type(model).__name__
    if TEXT not in model_parts(model):
        raise UnsupportedError(
            f"The export to {target!r} writes a program that reads token ids, but {name} has the part "
            f"{_listed(others)} and reads none. {_WHOLE}"
        )
    whole = 'For the whole model, to="stock" may work. ' if _runs_on_ids(model) else ""
    raise UnsupportedError(
        f"The export to {target!r} writes a program that reads token ids alone, so {name} would lose the part "
        f"{_listed(others)} and its inputs. Export the language model of its own: build it with "
        "AutoModelForCausalLM.from_config(model.config.get_text_config()), load the weights of the stock text part "
        f"into it, call patch_model on it, and export that. {whole}{_WHOLE}"
    )


def refuse_unchecked_modalities(model: PreTrainedModel) -> None:
    """Refuses models of images or sound whose stock checkpoint cannot be compared with them on token ids.

    Raises:
        UnsupportedError: if the model does not run on token ids, or another part than the text part has a scheme.
    """
    others, name = other_modalities(model), type(model).__name__
    if not others:
        return
    encoding = current_encoding(model)
    if not _runs_on_ids(model):
        remedy = _WHOLE if encoding is not None else "It has its stock positions, so save_pretrained is enough."
        raise UnsupportedError(
            f"An export is compared with the model on token ids, but {name} reads {model.main_input_name!r}. {remedy}"
        )
    named = None if encoding is None else parts_named(encoding.config)
    changed = [part for part in named or () if part != TEXT]
    if changed:
        raise UnsupportedError(
            f"The part {_listed(changed)} of this {name} has a scheme, and a stock checkpoint is only written for a "
            f"scheme of the text part. unpatch_model(model, part={changed[0]!r}) restores its native positions. "
            f"{_WHOLE}"
        )


def _runs_on_ids(model: PreTrainedModel) -> bool:
    return model.main_input_name == "input_ids" and default_part(model, model_parts(model)) == TEXT


def _listed(parts: list[str]) -> str:
    return " and ".join(repr(part) for part in parts)


_WHOLE = "save_pretrained saves the model with its scheme, for programs that import hf_posenc."
