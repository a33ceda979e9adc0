"""Ways of calling a model: whole, in steps with a cache, padded, with eager attention, with its tokens permuted."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from .population import Pair
from .shrinking import FIRST_TOKEN, VOCABULARY
from .tiny import tiny_model

LENGTH = 20
PREFILL = 13
PADDING = 5


class Caller:
    """One tiny model, and every way of calling it whose outputs have to agree.

    Args:
        pair: the architecture and its head.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.model = tiny_model(pair)
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (2, LENGTH), generator=generator)

    def _run(self, tokens: Tensor, model: PreTrainedModel | None = None, **options: Any) -> Tensor:
        model = self.model if model is None else model
        if self.pair.kind == "seq2seq":
            options["decoder_input_ids"] = (
                tokens.flip(-1) if "decoder_input_ids" not in options else options["decoder_input_ids"]
            )
        return output_of(model(input_ids=tokens, **options))

    def _decode(self, with_mask: bool, given_cache: bool = False, static: bool = False) -> Tensor:
        """Logits of the full sequence, computed with a cache: a prefill, then one token at a time."""
        if self.pair.kind == "seq2seq":
            return self._decode_decoder(static)
        cache: Any = StaticCache(config=self.model.config, max_cache_len=LENGTH + 4) if static else None
        if given_cache and not static:
            cache = DynamicCache(config=self.model.config)
        has_mems = "mems" in inspect.signature(type(self.model).forward).parameters
        if has_mems and static:
            raise TypeError("This architecture remembers in `mems` and takes no cache.")
        memory: dict[str, Any] | None = {"use_mems": True} if has_mems else None
        pieces = []
        bounds = [0, *range(PREFILL, LENGTH + 1)]
        for start, end in itertools.pairwise(bounds):
            options: dict[str, Any] = {"use_cache": True} if memory is None else dict(memory)
            if cache is not None:
                options["past_key_values"] = cache
            if with_mask:
                options["attention_mask"] = torch.ones(2, end, dtype=torch.int64)
                if "position_ids" in inspect.signature(type(self.model).forward).parameters:
                    options["position_ids"] = torch.arange(start, end).expand(2, -1)
            output = self.model(input_ids=self.tokens[:, start:end], **options)
            cache = getattr(output, "past_key_values", cache)
            if hasattr(output, "mems"):
                memory = {"mems": output.mems, "use_mems": True}
            pieces.append(output_of(output))
        return torch.cat(pieces, dim=1)

    def _decode_decoder(self, static: bool) -> Tensor:
        encoder_outputs = self.model.get_encoder()(input_ids=self.tokens)
        cache: Any = None
        if static:
            config = self.model.config.get_text_config(decoder=True)
            own, cross = (StaticCache(config=config, max_cache_len=length) for length in (LENGTH + 4, LENGTH))
            cache = EncoderDecoderCache(own, cross)
        target = self.tokens.flip(-1)
        pieces = []
        bounds = [0, *range(PREFILL, LENGTH + 1)]
        for start, end in itertools.pairwise(bounds):
            output = self.model(
                encoder_outputs=encoder_outputs,
                decoder_input_ids=target[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            pieces.append(output_of(output))
        return torch.cat(pieces, dim=1)

    def _alone(self) -> Tensor:
        return self._run(self.tokens[:1, : LENGTH - PADDING])

    def _padded(self, with_ids: bool) -> Tensor:
        """The logits of one sequence that was padded on the left."""
        tokens = self.tokens[:1, : LENGTH - PADDING]
        pad = _pad_token(self.model)
        mask = torch.cat((torch.zeros(1, PADDING, dtype=torch.int64), torch.ones_like(tokens)), dim=1)
        options: dict[str, Any] = {"attention_mask": mask}
        if with_ids:
            options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if self.pair.kind == "seq2seq":
            options["decoder_input_ids"] = tokens.flip(-1)
        padded = self._run(torch.cat((tokens.new_full((1, PADDING), pad), tokens), dim=1), **options)
        return padded if self.pair.kind == "seq2seq" else padded[:, PADDING:]

    def _eager(self) -> Tensor:
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            return self._run(self.tokens)
        finally:
            self.model.set_attn_implementation(before)

    def _permuted(self, model: PreTrainedModel) -> float:
        """How much the last token notices that the earlier ones changed places."""
        tokens = self.tokens[:1, :12]
        order = torch.tensor([7, 2, 10, 0, 5, 9, 1, 4, 8, 3, 6, 11])
        last, permuted = self._run(tokens, model)[:, -1], self._run(tokens[:, order], model)[:, -1]
        return float((last - permuted).abs().max() / last.std())


def output_of(output: Any) -> Tensor:
    """The logits, or the last hidden state of a model without a head."""
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    raise TypeError(f"{type(output).__name__} holds neither logits nor hidden states.")


def _pad_token(model: PreTrainedModel) -> int:
    return getattr(model.config, "pad_token_id", None) or 0
