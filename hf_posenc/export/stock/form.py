"""A stock model that is expected to compute what a patched model computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.errors import UnsupportedError
from hf_posenc.export.carriers import Form
from hf_posenc.export.layers import ModelParts
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.place.config_entry import detach_entry, native_lengths, write_lengths


@dataclass(frozen=True)
class StockForm(Form):
    """A class of transformers with a config and weights.

    Args:
        model_class: class of the checkpoint.
        config: its config.
        state: its state dict.

    Raises:
        UnsupportedError: for a config that its class does not accept, which no program could load.
    """

    model_class: type[PreTrainedModel]
    config: Any
    state: dict[str, Tensor]

    def __post_init__(self) -> None:
        for config, _ in _pairs(self.config, self.config):
            try:
                config.validate()
            except (StrictDataclassError, ValueError, KeyError, AttributeError, RuntimeError) as error:
                reason = error.__cause__ or error
                raise UnsupportedError(f"A {type(config).__name__} does not accept it: {reason}.") from error


def stock_config(model: PreTrainedModel) -> Any:
    """A copy of the config without the entry of a scheme, and with the native lengths."""
    config = copy.deepcopy(model.config)
    detach_entry(config)
    output = model.get_output_embeddings()
    if output is not None and output.weight is model.get_input_embeddings().weight:
        config.tie_word_embeddings = True  # Also if they were tied by hand. Only one of them is saved.
    return config


def stock_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the architecture itself, without those of a scheme."""
    return {name: tensor for name, tensor in model.state_dict().items() if ATTRIBUTE not in name.split(".")}


def current_config(parts: ModelParts) -> Any:
    """`stock_config` with the length of the patched model."""
    config = stock_config(parts.model)
    write_current_length(config, parts)
    return config


def write_current_length(config: Any, parts: ModelParts) -> None:
    """Writes the length of the patched model to a stock config."""
    lengths = parts.model.position_encoding.lengths
    if lengths.current not in (None, lengths.native):
        write_lengths(config, dict.fromkeys(native_lengths(parts.model.config), lengths.current))


def config_of(stack: Stack, model: PreTrainedModel, config: Any) -> Any:
    """The config of a stack inside a copy of the model's config."""
    match = next((copied for original, copied in _pairs(model.config, config) if original is stack.config), None)
    return config if match is None else match


def _pairs(original: Any, copied: Any) -> Iterator[tuple[Any, Any]]:
    """A config and the configs inside it, each with its copy."""
    yield original, copied
    for name, inner in original.__dict__.items():
        if isinstance(inner, PreTrainedConfig):
            yield from _pairs(inner, getattr(copied, name))
