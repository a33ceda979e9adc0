"""Compares a GGUF file, run by llama.cpp, with the model that it was made from, and limits the differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.export.gguf.gelu import gelu_of_llama_cpp, has_gelu
from hf_posenc.export.gguf.run import encode, encode_and_decode, predict, runtime
from hf_posenc.export.gguf.t5 import start_token
from hf_posenc.export.records import Check
from hf_posenc.export.samples import random_ids, relative_difference, spans
from hf_posenc.patching.anatomy.anatomy import find_stacks

#: The largest differences by what was compared: "logits" (minus their mean, relative to the largest where that exceeds
#: 1), "probabilities" of the next token, and "hidden states" (relative to the largest where that exceeds 1).
Differences = dict[str, float]
#: Runs the model and compares it with what llama.cpp has returned, each time in a mode, "prefill" or "decode".
Measure = Callable[[], Iterable[tuple[str, Differences]]]
#: New tokens per prompt. The first is predicted from the prompt, the others with llama.cpp's cache.
STEPS = 8
#: Lengths of prompts in tokens. A constant spectrum is compared well enough by these, because an error of a frequency
#: grows with the position from the start. ALiBi's steepest head sees about 10 tokens, and its flattest 4000.
_LENGTHS = (5, 48, 512)
#: A prompt that is longer than the original length of a scaling is added if it has at most this length.
_LONGEST = 2048
#: Added to what was compared if the model computes GELU as llama.cpp does.
SAME_GELU = " with llama.cpp's GELU"
#: Largest accepted differences. In float32, the programs differ in the order of sums and in llama.cpp's angles, which
#: it computes by repeated multiplication.
_EXACT = {"logits": 1e-4, "probabilities": 1e-3, "hidden states": 1e-4}
#: llama.cpp's GELU is a table of float16. It alone changes the hidden states of a stock MiniLM by 2e-3, those of a
#: MiniLM with other positions by up to 5e-3, and the logits of random GPT-2 models with 2 to 12 layers by up to 1.2e-3.
_GELU = 2e-2
#: With that GELU in the model too, a different order of sums can still lead to the next entry of the table: a noise of
#: 1e-7 in the embeddings changes the hidden states of MiniLM by 2e-4. Up to 6e-4 was measured. Wrong positions change
#: more: one wrong row of 512 in a table 6e-2, a base of RoPE that is wrong by 1 % 2e-2, lost ALiBi 0.8.
#: A new model (weights of std 0.02) hardly depends on positions, so there a wrong slope or base can stay below this.
_SAME_GELU = 2e-3
#: The same for rounded weights. A position encoding that is lost or wrong changes more (see tests/export/test_gguf.py),
#: and is found before, because the carrier is first compared in float32.
_ROUNDED = {
    "f16": {"logits": 1e-2, "probabilities": 1e-2, "hidden states": 1e-2},
    "q8_0": {"logits": 0.25, "probabilities": 0.15, "hidden states": 0.25},
}
#: Probabilities are compared for this many of llama.cpp's most probable tokens.
_TOP = 4096


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
    kinds = {(True,): _decoder, (False,): _encoder, (False, True): _encoder_decoder}
    measure = kinds[tuple(stack.causal for stack in find_stacks(model))](model, file, length)
    found = _by_mode(measure())
    if same_gelu and has_gelu(model):
        with gelu_of_llama_cpp(model):
            same = _by_mode(measure())
        for mode, differences in same.items():
            found[mode] |= {f"{what}{SAME_GELU}": value for what, value in differences.items()}
    return found


def _decoder(model: PreTrainedModel, file: Path, length: int) -> Measure:
    prompts = _prompts(model, length - STEPS)
    context = max(map(len, prompts)) + STEPS
    # The last logits alone, if the model can compute only these.
    last = {"logits_to_keep": STEPS} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    predictions = predict(file, prompts, STEPS, min(_TOP, model.config.get_text_config().vocab_size), context)

    def measure() -> Iterator[tuple[str, Differences]]:
        for prompt, steps in zip(prompts, predictions, strict=True):
            # The model sees the tokens that llama.cpp chose, so that one early difference does not make all later ones.
            ids = torch.tensor([[*prompt, *(step.ids[0] for step in steps[:-1])]], device=model.device)
            logits = model(input_ids=ids, use_cache=False, **last).logits[0, -STEPS:].float().cpu()
            for place, (expected, step) in enumerate(zip(logits, steps, strict=True)):
                differences = token_differences(expected, torch.tensor(step.ids), torch.tensor(step.logprobs))
                yield "prefill" if place == 0 else "decode", differences

    return measure


def _encoder(model: PreTrainedModel, file: Path, length: int) -> Measure:
    """Runs prompts in llama.cpp; the result runs them in the model and compares the hidden states of all tokens."""
    prompts = _prompts(model, length)
    states = encode(file, prompts)

    def measure() -> Iterator[tuple[str, Differences]]:
        for prompt, state in zip(prompts, states, strict=True):
            expected = model(input_ids=torch.tensor([prompt], device=model.device)).last_hidden_state[0].float().cpu()
            for one in state:
                yield "prefill", {"hidden states": relative_difference(one, expected)}

    return measure


def _encoder_decoder(model: PreTrainedModel, file: Path, length: int) -> Measure:
    """Runs prompts in llama.cpp, and tokens in the decoder after each; the result does the same in the model.

    The decoder reads random tokens, as many as the encoder. The last ones come one by one, with the cache.
    """
    prompts = _prompts(model, length)
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


def _prompts(model: PreTrainedModel, most: int) -> list[list[int]]:
    """Random tokens of several lengths, at most `most`."""
    longer = {end for _, end in spans(model) if end <= _LONGEST}
    lengths = sorted({max(1, min(length, most)) for length in {*_LENGTHS, *longer}})
    ids = random_ids(model, lengths[-1])[0].tolist()
    return [ids[:length] for length in lengths]


def token_differences(expected: Tensor, places: Tensor, logprobs: Tensor) -> Differences:
    """Differences of the prediction of a token.

    Args:
        expected: the model's logits, `(vocabulary,)` float32.
        places: the tokens that llama.cpp lists; others are less probable there than all of these.
        logprobs: their log-probabilities.
    """
    found_logits, expected_logits = logprobs - logprobs.mean(), expected[places] - expected[places].mean()
    logits = (found_logits - expected_logits).abs().max() / expected_logits.abs().max().clamp(min=1.0)
    dense = torch.zeros_like(expected).index_copy(0, places, logprobs.exp())
    unlisted = torch.ones_like(expected, dtype=torch.bool).index_fill(0, places, False)
    gap = (expected.softmax(-1) - dense).abs()
    gap = gap.where(~unlisted, (gap - logprobs.min().exp()).clamp(min=0))
    return {"logits": float(logits), "probabilities": float(gap.max())}


def _by_mode(found: Iterable[tuple[str, Differences]]) -> dict[str, Differences]:
    """The largest differences of each mode. One that is not a number is the largest."""
    merged: dict[str, Differences] = {}
    for mode, differences in found:
        before = merged.setdefault(mode, dict(differences))
        for what, value in differences.items():
            before[what] = max(before[what], value, key=lambda one: (one != one, one))
    return merged


def largest(found: dict[str, Differences]) -> Differences:
    """The largest differences of all modes."""
    return _by_mode(("", differences) for differences in found.values()).get("", {})


def limits(found: Differences, dtype: str) -> Differences:
    """The largest accepted differences.

    Args:
        found: the differences, by what was compared.
        dtype: precision of the file.
    """
    of_precision = _ROUNDED.get(dtype, _EXACT)
    allowed = {}
    for what in found:
        exact = of_precision[what.removesuffix(SAME_GELU)]
        if what.endswith(SAME_GELU):
            allowed[what] = max(exact, _SAME_GELU)
        else:
            allowed[what] = max(exact, _GELU) if what + SAME_GELU in found else exact
    return allowed


def excess(found: Differences) -> str | None:
    """Says in a sentence how far a float32 file is off; `None` if it is within the limits."""
    allowed = limits(found, "f32")
    if all(value <= allowed[what] for what, value in found.items()):
        return None
    named = [
        f"the {what} by {value:.2g}{'' if 'probabilities' in what else ' of the largest'} (allowed: {allowed[what]:g})"
        for what, value in found.items()
    ]
    sentence = ", ".join([named[0].replace(" by ", " differ by ", 1), *named[1:]])
    return f"llama.cpp gives other numbers. {sentence[0].upper()}{sentence[1:]}"


def checks(found: dict[str, Differences], dtype: str, *, limited: bool = True) -> tuple[Check, ...]:
    """The differences by mode as rows of the report.

    Args:
        found: the differences.
        dtype: precision of the file.
        limited: whether they had to be within the limits.
    """
    program = f"{runtime()}, {dtype}"
    return tuple(
        Check(program, mode, what, value, limits(differences, dtype)[what] if limited else None)
        for mode, differences in found.items()
        for what, value in differences.items()
    )
