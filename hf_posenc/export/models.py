"""Refuses models that cannot be exported, or that would lose a part in a target."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.targets import Target
from hf_posenc.patching.anatomy.anatomy import TEXT, Anatomy, is_part, refuse_remote_code
from hf_posenc.patching.place.encoding import current_encoding, refuse_changed

#: How to get the embeddings of an encoder-decoder.
_ENCODER = (
    "For embeddings alone, save the whole model with save_pretrained, load the folder with the class of its encoder "
    "(T5EncoderModel for a T5), and export that."
)
_WHOLE = "save_pretrained saves the model with its scheme, for programs that import hf_posenc."


def model_to_export(model: Any, merge_adapters: bool) -> PreTrainedModel:
    """Returns a model that can be exported. Adapters are merged into a copy.

    Raises:
        TypeError: for something that is not a transformers model.
        UnsupportedError: for a model with adapters that cannot or are not to be merged, with quantised weights, with
            weights that are not in memory, or with parts that were replaced after patching.
    """
    if not isinstance(model, PreTrainedModel) and hasattr(model, "peft_config"):
        if not hasattr(model, "merge_and_unload"):
            raise UnsupportedError(
                f"The adapters of this {type(model).__name__} add virtual tokens, or keys and values, and no program "
                "that export_model writes for has them. Export the model without them: model.get_base_model()."
            )
        if not merge_adapters:
            raise UnsupportedError(
                f"{type(model).__name__} has adapters around its weights. With merge_adapters=True they are merged "
                "into the weights of a copy, and the copy is exported."
            )
        with torch.no_grad():
            model = copy.deepcopy(model).merge_and_unload()
    if not isinstance(model, PreTrainedModel):
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        inside = next((path for path, module in modules if isinstance(module, PreTrainedModel)), None)
        remedy = "Load one with from_pretrained." if inside is None else f"Pass the one inside it: model.{inside}."
        raise TypeError(f"export_model needs a transformers model, got {type(model).__name__}. {remedy}")
    refuse_remote_code(model)
    name = type(model).__name__
    if is_part(model):
        raise UnsupportedError(f"{name} is a part of a model, and programs load whole models. {_ENCODER}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            f"This {name} has adapters that were added with add_adapter or load_adapter, which cannot be merged into "
            "its weights. Load the adapter with PeftModel.from_pretrained(model, folder) instead, and export with "
            "merge_adapters=True."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(
            f"{name} is quantised ({model.hf_quantizer.quantization_config.quant_method}), so its weights cannot be "
            "compared in float32. Export the unquantised model and quantise the result."
        )
    weights = itertools.chain(model.named_parameters(), model.named_buffers())
    absent = [key for key, weight in weights if weight.device.type == "meta"]
    if absent:
        raise UnsupportedError(
            f"{len(absent)} weights of this {name} are not in memory ({absent[0]} is on the meta device): it is "
            "offloaded, or was built without weights. Load it with device_map=None."
        )
    # Raises for a partly patched model, and for a model patched by another copy of the package.
    current_encoding(model)
    refuse_changed(model)
    return model


def unknown_tokens(tokenizer: Any, rows: int | None) -> str:
    """Says that a tokenizer, or that of a processor, has tokens beyond the rows of the embeddings; empty if not."""
    words = getattr(tokenizer, "tokenizer", tokenizer)
    last = max(words.get_vocab().values(), default=0) if hasattr(words, "get_vocab") else 0
    if rows is None or last < rows:
        return ""
    return (
        f"The tokenizer has the token id {last}, but the model has {rows} embeddings, so it cannot read text with such "
        f"tokens. Call model.resize_token_embeddings({last + 1}), or pass the tokenizer of this model."
    )


def other_modalities(model: PreTrainedModel) -> list[str]:
    """The parts of a model that read something other than text."""
    try:
        return [part for part in Anatomy(model).parts if part != TEXT]
    except UnsupportedError:
        return []  # A model without attention has no parts.


def refuse_unsuited(model: PreTrainedModel, target: Target) -> None:
    """Refuses a model that would lose a part in a target, or whose export cannot be compared with it on token ids.

    Raises:
        UnsupportedError: with what can be exported instead.
    """
    name, others = type(model).__name__, other_modalities(model)
    if others and target.keeps_images:
        _refuse_unchecked(model)
    elif others and TEXT not in Anatomy(model).parts:
        raise UnsupportedError(
            f"The export to {target.name!r} writes a program that reads token ids, but {name} has the part "
            f"{_listed(others)} and reads no token ids. {_WHOLE}"
        )
    elif others:
        whole = 'For the whole model, to="stock" may work. ' if _runs_on_ids(model) else ""
        raise UnsupportedError(
            f"The export to {target.name!r} writes a program that reads token ids alone, so {name} would lose the part "
            f"{_listed(others)} and its inputs. Export only its language model: build it with "
            "AutoModelForCausalLM.from_config(model.config.get_text_config()), load the weights of the stock text part "
            f"into it, call patch_model on it, and export that. {whole}{_WHOLE}"
        )
    if target.takes_almost_all and model.config.is_encoder_decoder:
        raise UnsupportedError(f"{name} has an encoder and a decoder, and this target writes one program. {_ENCODER}")


def _refuse_unchecked(model: PreTrainedModel) -> None:
    """Refuses models of images or sound that do not run on token ids, or in which another part has a scheme."""
    encoding, name = current_encoding(model), type(model).__name__
    if not _runs_on_ids(model):
        remedy = _WHOLE if encoding is not None else "It has its stock positions, so save_pretrained is enough."
        raise UnsupportedError(
            f"An export is compared with the model on token ids, but {name} reads {model.main_input_name!r}. {remedy}"
        )
    try:
        model.config.get_text_config()
    except ValueError as error:  # MusicGen: a text, and the codes of a sound.
        raise UnsupportedError(
            f"An export is compared with the model on token ids, but several parts of {name} read ids, of different "
            f"vocabularies. {_WHOLE}"
        ) from error
    named = None if encoding is None else encoding.config.part_names
    changed = [part for part in named or () if part != TEXT]
    if changed:
        raise UnsupportedError(
            f"The part {_listed(changed)} of this {name} has a scheme, and a stock checkpoint is only written for a "
            f"scheme of the text part. unpatch_model(model, part={changed[0]!r}) restores its native positions. "
            f"{_WHOLE}"
        )


def _runs_on_ids(model: PreTrainedModel) -> bool:
    return model.main_input_name == "input_ids" and Anatomy(model).main == TEXT


def _listed(parts: list[str]) -> str:
    return " and ".join(repr(part) for part in parts)
