"""Ways of calling a model: whole, in steps with a cache, padded, with eager attention, with other sizes and orders."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from .input_context import configs_in
from .inputs import accepted, call, inputs_for, running, tensors_of
from .population import Pair
from .shrinking import FIRST_TOKEN, VOCABULARY
from .tiny import tiny_model

#: Tokens of a model of text.
LENGTH = 20
#: The most tokens that are decoded one by one.
STEPS = 7
PADDING = 5
#: Models give entries that are never chosen the lowest number of their dtype.
_MASKED = 1e20


class Caller:
    """One tiny model, and every way of calling it whose outputs have to agree."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.model: PreTrainedModel = tiny_model(pair)
        self.inputs = self._tokens() if pair.has_vocabulary_head else self._inputs()

    def in_float64(self) -> Caller:
        """A copy whose model and inputs are in float64."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model).double()
        twin.inputs = {name: _double(value) for name, value in self.inputs.items()}
        # The grouped multiplication of experts is not defined for float64.
        twin.model.set_experts_implementation("eager")
        return twin

    def _tokens(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (2, LENGTH), generator=generator)
        return {"input_ids": tokens} | ({"decoder_input_ids": tokens.flip(-1)} if self.pair.kind == "seq2seq" else {})

    @torch.no_grad()
    def _inputs(self, size: int = 0) -> dict[str, Any]:
        return inputs_for(self.model, self.pair, size=size)

    def outputs(self, inputs: dict[str, Any] | None = None) -> Tensor:
        """The logits of a model of text; of others all numbers of an output in one row, 0 where the model masks them.

        Random samples have the same seed.
        """
        if self.pair.has_vocabulary_head:
            return self.logits(inputs)
        torch.manual_seed(5)
        tensors = tensors_of(call(self.model, self.inputs if inputs is None else inputs))
        if not tensors:
            raise TypeError("The output holds no numbers.")
        whole = torch.cat([torch.nan_to_num(one.float(), 0.0, 0.0, 0.0).flatten() for one in tensors])
        return whole.masked_fill(whole.abs() > _MASKED, 0.0)

    def logits(self, inputs: dict[str, Any] | None = None) -> Tensor:
        """(batch, tokens, vocabulary), or the hidden states of a model of text without a head."""
        torch.manual_seed(5)
        return self._logits_of(call(self.model, self.inputs if inputs is None else inputs))

    def _logits_of(self, output: Any) -> Tensor:
        names = ("logits", "prediction_logits", "last_hidden_state") if self.pair.has_vocabulary_head else ("logits",)
        logits = next((value for name in names if isinstance(value := getattr(output, name, None), Tensor)), None)
        if logits is None or logits.dim() != 3:
            raise TypeError(f"{type(output).__name__} has no logits over tokens.")
        return logits

    def of_another_size(self) -> Tensor:
        """Outputs for pictures of another resolution, or longer or shorter sound."""
        inputs = self._inputs(size=1)
        if "interpolate_pos_encoding" in accepted(type(running(self.model)).forward):
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

    def decoded(self, *, masked: bool = False, given: bool = False, static: bool = False) -> Tensor:
        """Logits of the full sequence: a prefill with all other inputs, then one token at a time.

        Args:
            masked: whether a mask and, where there are any, position ids are passed that `generate` would pass.
            given: whether the first call gets an empty cache.
            static: whether it is one of a fixed size.
        """
        name = self.tokens_name
        length = self.inputs[name].shape[1]
        bounds = [0, *range(length - min(STEPS, length // 3), length + 1)]
        parameters = accepted(type(running(self.model)).forward)
        memory: dict[str, Any] = {"use_mems": True} if "mems" in parameters else {"use_cache": True}
        if static and "mems" in parameters:
            raise TypeError("This architecture remembers in `mems` and takes no cache.")
        cache = self._empty_cache(static) if static or given else None
        encoded: Any = None
        pieces = []
        for start, end in itertools.pairwise(bounds):
            inputs = self._step(start, end)
            if masked and name == "input_ids":
                inputs["attention_mask"] = torch.ones(2, end, dtype=torch.int64)
                if "position_ids" in parameters:
                    inputs["position_ids"] = torch.arange(start, end).expand(2, -1)
            if encoded is not None:
                inputs = {key: value for key, value in inputs.items() if key in (name, "decoder_attention_mask")}
                inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded)
            if cache is not None:
                inputs["past_key_values"] = cache
            output = call(self.model, inputs | memory)
            cache = getattr(output, "past_key_values", cache)
            if hasattr(output, "mems"):
                memory["mems"] = output.mems
            encoded = getattr(output, "encoder_last_hidden_state", None)
            pieces.append(self._logits_of(output))
        return torch.cat(pieces, dim=1)

    def _empty_cache(self, static: bool) -> Any:
        config = self.model.config.get_text_config(decoder=True)
        if not static:
            return DynamicCache(config=config)
        if self.tokens_name == "input_ids":
            return StaticCache(config=config, max_cache_len=LENGTH + 4)
        return EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=one) for one in (LENGTH + 4, LENGTH)))

    def _step(self, start: int, end: int) -> dict[str, Any]:
        name = self.tokens_name
        inputs: dict[str, Any] = {}
        for key, value in self.inputs.items():
            if key == "attention_mask" and name == "input_ids":
                inputs[key] = value[:, :end]
            elif key == name or (
                self._is_over(name, value) and key.endswith(("token_type_ids", "position_mask", "cross_attention_mask"))
            ):
                inputs[key] = value[:, start:end]
            elif start == 0 or name == "decoder_input_ids":
                inputs[key] = value
        return inputs

    def _is_over(self, name: str, value: Any) -> bool:
        """Whether a value has a place for every token of an argument."""
        return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == self.inputs[name].shape

    def padded(self, with_ids: bool = False) -> Tensor:
        """Logits of the tokens behind padding on the left.

        Args:
            with_ids: whether the positions are passed that `generate` passes.
        """
        inputs = {"attention_mask": torch.ones_like(self.inputs["input_ids"])} | self.inputs
        for key, value in inputs.items():
            if self._is_over("input_ids", value) and not key.startswith("decoder"):
                inputs[key] = torch.cat((torch.zeros_like(value[:, :PADDING]), value), dim=1)
        if with_ids:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        logits = self.logits(inputs)
        return logits if self.tokens_name == "decoder_input_ids" else logits[:, PADDING:]

    def permuted(self, model: PreTrainedModel) -> float:
        """How much the output at the last token changes if the earlier tokens change places."""
        tokens = self.inputs["input_ids"][:1, :12]
        order = torch.tensor([7, 2, 10, 0, 5, 9, 1, 4, 8, 3, 6, 11])
        last, moved = (self._logits_of(model(input_ids=one))[:, -1] for one in (tokens, tokens[:, order]))
        return float((last - moved).abs().max() / last.std())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _configs(model: PreTrainedModel) -> list[Any]:
    """All configs of a model, those of parts that are no models included."""
    owners = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    return list({id(config): config for owner in owners for config in configs_in(owner)}.values())
