"""The programs that run exports: their predictions, texts and embeddings, and how long they take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from benchmarks.llama_cpp import timed
from hf_posenc.export.gguf.run import decode, tokenize
from hf_posenc.export.onnx import Session

#: Tokens of a long prompt that are read at once. A graph computes the logits of all of them.
_CHUNK = 512
#: Reads further tokens of one text. Returns the log-probabilities after each, `(tokens, vocabulary)`.
Read = Callable[[Sequence[int]], Tensor]
#: What onnxruntime runs, by the name of the program.
ONNX = {"onnxruntime": "model.onnx", "onnxruntime, int8": "model_quantized.onnx"}
#: llama.cpp's own cache is float16, with flash attention.
DEFAULT_CACHE = "llama.cpp, f32, default cache"


def in_transformers(model: Any) -> Read:
    """Returns a reader of a new text."""
    cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def read(ids: Sequence[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0]
        return logits.float().log_softmax(-1)

    return read


def in_onnxruntime(session: Session) -> Read:
    """Returns a reader of a new text."""
    keys = [shape for name, shape in session.inputs.items() if name.startswith("past_key_values")][::2]
    past = [(torch.zeros(1, shape[1], 0, shape[3]),) * 2 for shape in keys]
    length = 0

    def read(ids: Sequence[int]) -> Tensor:
        nonlocal past, length
        length += len(ids)
        given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, length, dtype=torch.int64)}
        outputs = session(given, past)
        present = [value for name, value in outputs.items() if name.startswith("present")]
        past = list(zip(present[::2], present[1::2], strict=True))
        return outputs["logits"][0].log_softmax(-1)

    return read


def predictions(start: Callable[[], Read], windows: Sequence[Sequence[int]], prompt: int, last: int) -> list[Tensor]:
    """The log-probabilities after the tokens of windows: the prompt in pieces, and every later token by itself.

    Args:
        start: returns a reader of a new text.
        prompt: the number of tokens that are read in pieces.
        last: the number of places that are kept; 0 for all.
    """
    found = []
    for window in windows:
        read, ids, pieces = start(), torch.tensor(window[:-1]), []
        for piece in (*ids[:prompt].split(_CHUNK), *ids[prompt:].split(1)):
            if len(piece):
                logprobs = read(piece.tolist())
                pieces.append(logprobs[-last:])
        found.append(torch.cat(pieces)[-last:])
    return found


def written(start: Callable[[], Read], prompts: Sequence[str], count: int, folder: Path) -> list[str]:
    """The texts of `count` most probable tokens after each prompt. The end of a text is no end."""
    tokenizer, texts = AutoTokenizer.from_pretrained(folder), []
    for prompt in prompts:
        read, ids, tokens = start(), tokenizer(prompt)["input_ids"], []
        for _ in range(count):
            logprobs = read(ids)[-1].clone()
            logprobs[_ends(folder)] = -torch.inf
            ids = [int(logprobs.argmax())]
            tokens += ids
        texts.append(tokenizer.decode(tokens))
    return texts


def _ends(folder: Path) -> list[int]:
    tokens = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return tokens if isinstance(tokens, list) else [tokens]


def of_llama_cpp(
    folder: Path, windows: Sequence[Sequence[int]], prompt: int, vocabulary: int, *, precise: bool
) -> list[Tensor]:
    """The log-probabilities after the prompt and after each later token of windows."""
    batches = [[window[:prompt], *([token] for token in window[prompt:-1])] for window in windows]
    return [
        logits.log_softmax(-1)[:, :vocabulary] for logits in decode(folder / "model.gguf", batches, precise=precise)
    ]


def written_by_llama_cpp(folder: Path, prompts: Sequence[str], count: int) -> list[str]:
    """As `written`."""
    file, tokenizer = folder / "model.gguf", AutoTokenizer.from_pretrained(folder)
    given = [[ids] for ids in tokenize(file, prompts)]
    rows = decode(file, given, count - 1, without=[tokenizer.eos_token_id])
    texts: list[str] = tokenizer.batch_decode([row.argmax(-1).tolist() for row in rows])
    return texts


def embeddings(run: Callable[[dict[str, Tensor]], Tensor], passages: Sequence[Sequence[int]]) -> Tensor:
    """Mean-pooled states of passages in one padded batch; unit vectors, `(passages, hidden)`.

    `run` returns the states, `(passages, length, hidden)`, for the inputs of an encoder.
    """
    rows = [torch.tensor(passage) for passage in passages]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    states = run({"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)})
    pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(pooled, dim=-1)


def times(program: str, folder: Path, prompt: Sequence[int], steps: int) -> Mapping[str, float]:
    """Milliseconds per token: reading a prompt, and writing after it."""
    if program not in ONNX:
        return timed(folder / "model.gguf", prompt, steps)
    session = Session(folder / ONNX[program])
    in_onnxruntime(session)(prompt[:8])
    clock, read, ids = [time.perf_counter()], in_onnxruntime(session), list(prompt)
    for _ in range(1 + steps):
        ids = [int(read(ids)[-1].argmax())]
        clock.append(time.perf_counter())
    reading, writing = clock[1] - clock[0], clock[-1] - clock[1]
    return {"reading": 1000 * reading / len(prompt), "writing": 1000 * writing / steps}


def agreement(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> np.ndarray:
    """Whether the most probable token is the same at each place that both have."""
    pairs = zip(found, wanted, strict=True)
    equal: np.ndarray = torch.cat([one.argmax(-1) == other[-len(one) :].argmax(-1) for one, other in pairs]).numpy()
    return equal
