"""Compares a GGUF file, run by llama.cpp, with the model that it was made from."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.export.comparison import random_ids, relative_difference, spans
from hf_posenc.export.gguf.run import decode, encode, runtime
from hf_posenc.export.gguf.t5 import start_token
from hf_posenc.export.records import Check
from hf_posenc.patching.anatomy.anatomy import Anatomy

#: Token ids by the names of the model's inputs, and the results of llama.cpp for them: logits of the last `STEPS`
#: tokens, or hidden states by each of its functions.
Case = tuple[dict[str, list[int]], Tensor]
#: New tokens per prompt. The first is predicted from the prompt, the others with llama.cpp's cache.
STEPS = 8
#: Lengths of prompts in tokens. A constant spectrum is compared well enough by these, because an error of a frequency
#: grows with the position from the start. ALiBi's steepest head sees about 10 tokens, and its flattest 4000.
_LENGTHS = (5, 48, 512)
#: A prompt that is longer than the original length of a scaling is added if it has at most this length.
_LONGEST = 2048
#: Added to the compared quantity if the model computes GELU as llama.cpp does.
SAME_GELU = " with llama.cpp's GELU"
#: llama.cpp returns 0 below the negative of this, and its argument above it, for GELU.
_LIMIT = 10.0
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
#: Largest accepted differences for rounded weights. A position encoding that is lost or wrong changes more (see
#: tests/export/test_gguf.py), and is found before, because the carrier is first compared in float32.
_ROUNDED = {
    "f16": {"logits": 1e-2, "probabilities": 1e-2, "hidden states": 1e-2},
    "q8_0": {"logits": 0.25, "probabilities": 0.15, "hidden states": 0.25},
}


@torch.no_grad()
def compare(model: PreTrainedModel, file: Path, length: int, dtype: str) -> Iterator[Check]:
    """Runs prompts of several lengths in both programs, and decodes from each.

    A float32 file of a model with GELU is compared a second time, with llama.cpp's GELU in the model.

    Args:
        model: the model in float32.
        file: the exported file.
        length: the longest sequence that the file is made for.
        dtype: precision of the file.
    """
    generates = any(stack.causal for stack in Anatomy(model).stacks())
    cases = (_decoded if generates else _encoded)(model, file, length)
    program, twice = f"{runtime()}, {dtype}", dtype == "f32" and has_gelu(model)
    for mode, what, value in _measured(model, cases):
        limit = _ROUNDED.get(dtype, _EXACT)[what]
        yield Check(program, mode, what, value, max(limit, _GELU) if twice else limit)
    if twice:
        with gelu_of_llama_cpp(model):
            for mode, what, value in _measured(model, cases):
                yield Check(program, mode, f"{what}{SAME_GELU}", value, max(_EXACT[what], _SAME_GELU))


def _measured(model: PreTrainedModel, cases: Iterable[Case]) -> Iterator[tuple[str, str, float]]:
    """Runs the model, and compares it with llama.cpp: the mode ("prefill" or "decode"), a quantity, its difference.

    The quantities are "logits" (minus their mean), "probabilities" of the next token, and "hidden states". All but
    probabilities are relative to the largest where that exceeds 1.
    """
    # The last logits alone, and no cache, if the model has these options.
    known = inspect.signature(model.forward).parameters
    options = {name: value for name, value in {"logits_to_keep": STEPS, "use_cache": False}.items() if name in known}
    for inputs, rows in cases:
        output = model(**{name: torch.tensor([ids], device=model.device) for name, ids in inputs.items()}, **options)
        if "logits" not in output:
            expected = output.last_hidden_state[0].float().cpu()
            yield from (("prefill", "hidden states", relative_difference(row, expected)) for row in rows)
            continue
        for step, (expected, row) in enumerate(zip(output.logits[0, -STEPS:].float().cpu(), rows, strict=True)):
            mode, logits = "decode" if step else "prefill", row[: len(expected)]
            yield mode, "logits", relative_difference(logits - logits.mean(), expected - expected.mean())
            yield mode, "probabilities", float((logits.softmax(-1) - expected.softmax(-1)).abs().max())


def _encoded(model: PreTrainedModel, file: Path, length: int) -> list[Case]:
    """The hidden states of all tokens."""
    prompts = _prompts(model, length)
    return [({"input_ids": ids}, rows) for ids, rows in zip(prompts, encode(file, prompts), strict=True)]


def _decoded(model: PreTrainedModel, file: Path, length: int) -> list[Case]:
    """The logits after random tokens, and after further ones, which come one by one, with the cache.

    A decoder after an encoder reads random tokens only. Any other decoder continues with the tokens that llama.cpp
    chose, so that one early difference does not make all later ones.
    """
    more = STEPS - 1
    if model.config.is_encoder_decoder:
        prompts, first = _prompts(model, length), start_token(model)
        texts = [[first, *reversed(prompt), *prompt[:STEPS]][: len(prompt) + STEPS] for prompt in prompts]
        batches = [[text[:-more], *([token] for token in text[-more:])] for text in texts]
        inputs = [{"input_ids": ids, "decoder_input_ids": after} for ids, after in zip(prompts, texts, strict=True)]
        return list(zip(inputs, decode(file, batches, encoded=prompts), strict=True))
    prompts = _prompts(model, length - STEPS)
    logits = decode(file, [[prompt] for prompt in prompts], more)
    decoded = zip(prompts, logits, strict=True)
    return [({"input_ids": [*prompt, *rows[:-1].argmax(-1).tolist()]}, rows) for prompt, rows in decoded]


def _prompts(model: PreTrainedModel, most: int) -> list[list[int]]:
    """Random tokens of several lengths, at most `most`."""
    longer = {end for _, end in spans(model) if end <= _LONGEST}
    lengths = sorted({max(1, min(length, most)) for length in {*_LENGTHS, *longer}})
    ids = random_ids(model, lengths[-1])[0].tolist()
    return [ids[:length] for length in lengths]


def has_gelu(model: PreTrainedModel) -> bool:
    """Whether a model has a GELU, in any of its forms."""
    return any(map(_is_gelu, model.modules()))


def _is_gelu(module: nn.Module) -> bool:
    return "gelu" in type(module).__name__.lower() and not any(module.children())


@contextmanager
def gelu_of_llama_cpp(model: PreTrainedModel) -> Iterator[None]:
    """The model computes GELU as llama.cpp does on a CPU: by a table of float16 with the form that uses tanh.

    This changes hidden states by about 1e-3, which is as much as some wrong positions do. With the same GELU on both
    sides, a comparison shows everything else.
    """
    with ExitStack() as hooks:
        for module in filter(_is_gelu, model.modules()):
            hook = module.register_forward_hook(lambda _module, arguments, _output: table_gelu(arguments[0]))
            hooks.enter_context(hook)
        yield


def table_gelu(x: Tensor) -> Tensor:
    """GELU of a float32 tensor as in llama.cpp's table (`ggml_vec_gelu_f32`)."""
    rounded = nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -_LIMIT, 0.0, torch.where(x >= _LIMIT, x, rounded))
