"""A stock model that is expected to compute what a patched model computes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.patching.find.discovery import find_stacks
from hf_posenc.patching.place.config_entry import detach_entry
from hf_posenc.patching.place.config_lengths import find_lengths, write_lengths


@dataclass(frozen=True)
class StockForm:
    """A class of transformers with a config and weights.

    Args:
        model_class: class of the checkpoint.
        config: its config.
        state: its state dict.
        carrier: what carries the scheme, in a few words.
        restriction: inputs of the model that the stock model does not take, as a sentence; empty if it takes all.
    """

    model_class: type[PreTrainedModel]
    config: Any
    state: dict[str, Tensor]
    carrier: str
    restriction: str = ""


def stock_config(model: PreTrainedModel) -> Any:
    """A copy of the config without the entry of a scheme, and with the native lengths."""
    config = copy.deepcopy(model.config)
    detach_entry(config)
    return config


def stock_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the architecture itself, without those of a scheme."""
    return {name: tensor for name, tensor in model.state_dict().items() if ATTRIBUTE not in name.split(".")}


def write_current_length(config: Any, model: PreTrainedModel) -> None:
    """Writes the length of the patched model to a stock config, unless the model has a table with that many rows."""
    lengths = model.position_encoding.lengths
    if lengths.current is None or lengths.current == lengths.native or any(s.tables for s in find_stacks(model)):
        return
    native = find_lengths(config, [getattr(config, key, None) for key in config.sub_configs])
    write_lengths(config, dict.fromkeys(native, lengths.current))
