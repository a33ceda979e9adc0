"""Compares a GGUF file, run by llama.cpp, with the model that it was made from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_posenc.export.gguf.differences import STEPS, Differences, Measure, by_mode, prompts_for, token_differences
from hf_posenc.export.gguf.gelu import gelu_of_llama_cpp, has_gelu
from hf_posenc.export.gguf.run import predict
from hf_posenc.export.gguf.verify_encoders import encoder, encoder_decoder
from hf_posenc.patching.find.discovery import find_stacks

#: Probabilities are compared for this many of llama.cpp's most probable tokens.
_TOP = 4096
#: Added to what was compared if the model computes GELU as llama.cpp does.
SAME_GELU = " with llama.cpp's GELU"


@torch.no_grad()
def compare(model: PreTrainedModel, file: Path, length: int, same_gelu: bool) -> dict[str, Differences]:
    """Runs prompts of several lengths in both programs, and decodes from each.

    Args:
        model: the model in float32.
        file: the exported file.
        length: the longest sequence that the file is made for.
        same_gelu: whether to compare a model with GELU a second time, with llama.cpp's GELU.

    Returns:
        The differences by mode: "prefill" and "decode", or only "prefill" for an encoder.
    """
    kinds = {(True,): _decoder, (False,): encoder, (False, True): encoder_decoder}
    measure = kinds[tuple(stack.causal for stack in find_stacks(model))](model, file, length)
    found = by_mode(measure())
    if same_gelu and has_gelu(model):
        with gelu_of_llama_cpp(model):
            same = by_mode(measure())
        for mode, differences in same.items():
            found[mode] |= {f"{what}{SAME_GELU}": value for what, value in differences.items()}
    return found


def _decoder(model: PreTrainedModel, file: Path, length: int) -> Measure:
    prompts = prompts_for(model, length - STEPS)
    context = max(map(len, prompts)) + STEPS
    predictions = predict(file, prompts, STEPS, min(_TOP, _vocabulary(model)), context)

    def measure() -> Iterator[tuple[str, Differences]]:
        for prompt, steps in zip(prompts, predictions, strict=True):
            # The model sees the tokens that llama.cpp chose, so that one early difference does not make all later ones.
            ids = torch.tensor([[*prompt, *(step.ids[0] for step in steps[:-1])]], device=model.device)
            logits = model(input_ids=ids, use_cache=False, **_last(model, STEPS)).logits[0, -STEPS:].float().cpu()
            for place, (expected, step) in enumerate(zip(logits, steps, strict=True)):
                differences = token_differences(expected, torch.tensor(step.ids), torch.tensor(step.logprobs))
                yield "prefill" if place == 0 else "decode", differences

    return measure


def _last(model: PreTrainedModel, count: int) -> dict[str, int]:
    """The argument for computing only the last logits, if the model has it."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)
