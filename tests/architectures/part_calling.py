"""Ways of calling a model with any inputs: whole, in steps with a cache, padded, with other contents and sizes."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .input_context import configs_in
from .inputs import call, inputs_for, tensors_of
from .population import Pair
from .tiny import tiny_model

STEPS = 4
#: Models give entries that are never chosen the lowest number of their dtype.
_MASKED = 1e20
PADDING = 5


class PartCaller:
    """One tiny model with inputs for every modality.

    Args:
        pair: the architecture.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.model: PreTrainedModel = tiny_model(pair)
        self.passes_positions = False
        with torch.no_grad():
            self.inputs = inputs_for(self.model, pair)

    def outputs(self, inputs: dict[str, Any] | None = None) -> Tensor:
        """All numbers of an output in one row, 0 where the model masks them; with the same seed for random samples."""
        torch.manual_seed(5)
        tensors = tensors_of(call(self.model, self.inputs if inputs is None else inputs))
        if not tensors:
            raise TypeError("The output holds no numbers.")
        whole = torch.cat([torch.nan_to_num(one.float(), 0.0, 0.0, 0.0).flatten() for one in tensors])
        return whole.masked_fill(whole.abs() > _MASKED, 0.0)

    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """(batch, tokens, vocabulary) of the last tensor over tokens."""
        output = call(self.model, inputs)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise TypeError("The output has no logits over tokens.")
        return logits

    def of_another_size(self) -> Tensor:
        """Outputs for pictures of another resolution, or longer or shorter sound."""
        inputs = inputs_for(self.model, self.pair, size=1)
        if "interpolate_pos_encoding" in inspect.signature(type(self.model).forward).parameters:
            inputs["interpolate_pos_encoding"] = True
        return self.outputs(inputs)

    def eager(self) -> Tensor:
        """Outputs with eager attention."""
        before = {id(one): one._attn_implementation for one in _configs(self.model)}
        self.model.set_attn_implementation("eager")
        try:
            return self.outputs()
        finally:
            for one in _configs(self.model):
                one._attn_implementation = before.get(id(one), "sdpa")

    @property
    def tokens_name(self) -> str:
        """The argument with the tokens that are generated."""
        return "decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"

    def decoded(self) -> Tensor:
        """Logits of the full sequence: a prefill with all other inputs, then one token at a time."""
        name = self.tokens_name
        tokens = self.inputs[name]
        length = tokens.shape[1]
        bounds = [0, *range(length - STEPS, length + 1)]
        cache: Any = None
        encoded: Any = None
        pieces = []
        for start, end in itertools.pairwise(bounds):
            inputs = self._step(start, end)
            if encoded is not None:
                inputs = {key: value for key, value in inputs.items() if key in (name, "decoder_attention_mask")}
                inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded)
            output = call(self.model, inputs | {"past_key_values": cache, "use_cache": True})
            cache = output.past_key_values
            encoded = getattr(output, "encoder_last_hidden_state", None)
            pieces.append(output.logits)
        return torch.cat(pieces, dim=1)

    def _step(self, start: int, end: int) -> dict[str, Any]:
        name = self.tokens_name
        length = self.inputs[name].shape[1]
        inputs: dict[str, Any] = {}
        for key, value in self.inputs.items():
            over_tokens = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (2, length)
            if key == "attention_mask" and name == "input_ids":
                inputs[key] = value[:, :end]
            elif key == name or (
                over_tokens and key.endswith(("token_type_ids", "position_mask", "cross_attention_mask"))
            ):
                inputs[key] = value[:, start:end]
            elif start == 0 or name == "decoder_input_ids":
                inputs[key] = value
        return inputs

    def padded(self) -> Tensor:
        """Logits of the tokens behind padding on the left, at the positions that `generate` passes."""
        inputs = dict(self.inputs)
        length = inputs["input_ids"].shape[1]
        for key, value in self.inputs.items():
            if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (2, length):
                inputs[key] = torch.cat((torch.zeros_like(value[:, :PADDING]), value), dim=1)
        if self.passes_positions:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return self.logits(inputs)[:, PADDING:]


def _configs(model: PreTrainedModel) -> list[Any]:
    """All configs of a model, those of parts that are no models included."""
    owners = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    return list({id(config): config for owner in owners for config in configs_in(owner)}.values())
