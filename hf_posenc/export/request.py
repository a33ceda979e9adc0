"""What a writer is asked for, and the models that no target can take."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.inspection import native_scheme
from hf_posenc.patching.place.encoding import current_encoding, refuse_changed
from hf_posenc.schemes import SchemeConfig
from hf_posenc.schemes.labels import scheme_label

#: How to get the embeddings of an encoder-decoder.
_ENCODER = (
    "For embeddings alone, save the whole model with save_pretrained, load the folder with the class of its encoder "
    "(T5EncoderModel for a T5), and export that."
)


@dataclass(frozen=True)
class Request:
    """A model to export.

    Args:
        model: a transformers model without adapters, patched or stock. Writers leave it unchanged.
        draft: an empty folder to write into.
        tokenizer: the model's tokenizer, if it was given.
        approximate: whether the outputs may differ. A writer still measures the difference.
    """

    model: PreTrainedModel
    draft: Path
    tokenizer: Any = None
    approximate: bool = False

    @property
    def scheme(self) -> SchemeConfig:
        """The scheme in force: the one the model was patched with, or its native one."""
        encoding = current_encoding(self.model)
        return native_scheme(self.model) if encoding is None else encoding.config

    def label(self) -> str:
        """The scheme for messages; "stock" if the model has positions that no scheme describes."""
        try:
            return scheme_label(self.scheme)
        except UnsupportedError:
            return "stock"


def refuse_encoder_decoder(model: PreTrainedModel) -> None:
    """Refuses a model with an encoder and a decoder, for targets that write one program.

    Raises:
        UnsupportedError: saying how to export the encoder.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{type(model).__name__} has an encoder and a decoder, and this target writes one program. {_ENCODER}"
        )


def model_to_export(model: Any, merge_adapters: bool) -> PreTrainedModel:
    """Returns a model that can be exported. Adapters are merged into a copy.

    Raises:
        TypeError: for something that is not a transformers model.
        UnsupportedError: for a model with adapters that are not to be merged, with quantised weights, with weights that
            are not in memory, or with parts that were replaced after patching.
    """
    if not isinstance(model, PreTrainedModel) and hasattr(model, "merge_and_unload"):
        if not merge_adapters:
            raise UnsupportedError(
                f"{type(model).__name__} has adapters around its weights. With merge_adapters=True they are merged "
                "into the weights of a copy, and the copy is exported."
            )
        with torch.no_grad():
            model = copy.deepcopy(model).merge_and_unload()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"export_model needs a transformers model, got {type(model).__name__}. Pass the model inside the wrapper "
            "(model.module of DistributedDataParallel, model._orig_mod of torch.compile)."
        )
    name = type(model).__name__
    if type(model).__module__.startswith("transformers.models.") and not hasattr(transformers, name):
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
    absent = [key for key, weight in model.named_parameters() if weight.device.type == "meta"]
    if absent:
        raise UnsupportedError(
            f"{len(absent)} weights of this {name} are not in memory ({absent[0]} is on the meta device): it is "
            "offloaded, or was built without weights. Load it with device_map=None."
        )
    # Raises for a partly patched model, and for a model patched by another copy of the package.
    current_encoding(model)
    refuse_changed(model)
    return model
