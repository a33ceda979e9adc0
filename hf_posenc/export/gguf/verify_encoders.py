"""Compares the GGUF file of an encoder, or of an encoder-decoder, with the model that it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_posenc.export.gguf.differences import STEPS, Differences, Measure, prompts_for, token_differences
from hf_posenc.export.gguf.run import encode, encode_and_decode
from hf_posenc.export.gguf.t5_blocks import start_token
from hf_posenc.export.samples import relative_difference


def encoder(model: PreTrainedModel, file: Path, length: int) -> Measure:
    """Runs prompts in llama.cpp; the result runs them in the model and compares the hidden states of all tokens."""
    prompts = prompts_for(model, length)
    states = encode(file, prompts)

    def measure() -> Iterator[tuple[str, Differences]]:
        for prompt, state in zip(prompts, states, strict=True):
            expected = model(input_ids=torch.tensor([prompt], device=model.device)).last_hidden_state[0].float().cpu()
            for one in state:
                yield "prefill", {"hidden states": relative_difference(one, expected)}

    return measure


def encoder_decoder(model: PreTrainedModel, file: Path, length: int) -> Measure:
    """Runs prompts in llama.cpp, and tokens in the decoder after each; the result does the same in the model.

    The decoder reads random tokens, as many as the encoder. The last ones come one by one, with the cache.
    """
    prompts = prompts_for(model, length)
    first = start_token(model)
    targets = [[first, *reversed(prompt), *prompt[:STEPS]][: len(prompt) + STEPS] for prompt in prompts]
    batches = [[target[: 1 - STEPS], *([token] for token in target[1 - STEPS :])] for target in targets]
    logits = encode_and_decode(file, prompts, batches)

    def measure() -> Iterator[tuple[str, Differences]]:
        for prompt, target, rows in zip(prompts, targets, logits, strict=True):
            ids, after = (torch.tensor([one], device=model.device) for one in (prompt, target))
            expected = model(input_ids=ids, decoder_input_ids=after, use_cache=False).logits[0, -STEPS:].float().cpu()
            for place, (one, row) in enumerate(zip(expected, rows, strict=True)):
                differences = token_differences(one, torch.arange(len(one)), row[: len(one)].log_softmax(-1))
                yield "prefill" if place == 0 else "decode", differences

    return measure
