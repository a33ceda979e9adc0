"""Runs GGUF files in llama.cpp."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError

#: The script that runs llama.cpp, and its exit code if llama.cpp does not load the file.
_SCRIPT, _CANNOT_LOAD = Path(__file__).with_name("in_llama_cpp.py"), 3


@dataclass(frozen=True)
class Prediction:
    """llama.cpp's prediction of the next token.

    Args:
        ids: the most probable tokens, in descending order.
        logprobs: their log-probabilities.
    """

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Completion:
    """A greedy continuation by llama.cpp.

    Args:
        text: the new tokens as text.
        timings: what llama.cpp measured, in milliseconds ("prompt_per_token_ms", "predicted_per_token_ms").
    """

    text: str
    timings: dict[str, float]


def runtime() -> str:
    """The program that runs the files, with its version."""
    return f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})"


def predict(
    file: Path,
    prompts: Sequence[Sequence[int]],
    steps: int,
    top: int,
    context: int,
    *,
    following: Sequence[Sequence[int]] | None = None,
    precise: bool = True,
) -> list[list[Prediction]]:
    """Predicts the tokens after prompts.

    Args:
        file: of the model.
        prompts: token ids.
        steps: number of new tokens. The first is predicted from the prompt, and the others with the cache.
        top: number of tokens whose probabilities are returned.
        context: size of the cache in tokens.
        following: for each prompt, the `steps - 1` tokens that follow it. By default each is the most probable one.
        precise: whether the cache is float32 and flash attention is off, so that only the file rounds; if false,
            llama.cpp's defaults.

    Returns:
        For each prompt, its steps.

    Raises:
        UnsupportedError: if llama.cpp cannot run the file.
        ValueError: for another number of following tokens.
    """
    given = [None] * len(prompts) if following is None else [list(tokens) for tokens in following]
    wrong = [len(tokens) for tokens in given if tokens is not None and len(tokens) != steps - 1]
    if wrong:
        raise ValueError(f"{wrong[0]} tokens follow a prompt, and {steps} steps need {steps - 1}.")
    jobs = [
        {"prompt": list(prompt), "steps": steps, "top": top, "following": tokens}
        for prompt, tokens in zip(prompts, given, strict=True)
    ]
    results = _run(file, "Server", "predict", jobs, context, precise)
    return [[Prediction(**step) for step in found] for found in results]


def complete(
    file: Path, prompts: Sequence[Sequence[int] | str], steps: int, *, context: int, precise: bool
) -> list[Completion]:
    """Continues prompts greedily, as text.

    Args:
        file: of the model.
        prompts: token ids or texts.
        steps: number of new tokens.
        context: size of the cache in tokens.
        precise: whether the cache is float32; if false, llama.cpp's defaults.

    Raises:
        UnsupportedError: if llama.cpp cannot run the file.
    """
    jobs = [{"prompt": prompt if isinstance(prompt, str) else list(prompt), "steps": steps} for prompt in prompts]
    return [Completion(**found) for found in _run(file, "Server", "complete", jobs, context, precise)]


def tokenize(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts.

    Raises:
        UnsupportedError: if llama.cpp cannot read the file.
    """
    return _run(file, "Server", "tokenize", [{"text": text} for text in texts])


def encode(file: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The last hidden states of an encoder, computed in float32, so that only the file rounds.

    Args:
        file: of the model.
        prompts: token ids.

    Returns:
        For each prompt, `(2, tokens, width)` float32: from `llama_encode`, and from `llama_decode`, which llama.cpp's
        server calls.

    Raises:
        UnsupportedError: if llama.cpp cannot run the file.
    """
    jobs = [{"ids": list(prompt)} for prompt in prompts]
    return [*map(torch.from_numpy, _run(file, "Library", "encode", jobs, max(map(len, prompts))))]


def encode_and_decode(
    file: Path, prompts: Sequence[Sequence[int]], batches: Sequence[Sequence[Sequence[int]]]
) -> list[Tensor]:
    """The logits of an encoder-decoder, computed in float32, so that only the file rounds.

    Args:
        file: of the model.
        prompts: token ids of the encoder.
        batches: for each prompt, token ids of the decoder in batches. All but the first batch use the cache.

    Returns:
        For each prompt, the logits after each batch, `(batches, vocabulary)` float32.

    Raises:
        UnsupportedError: if llama.cpp cannot run the file.
    """
    pairs = list(zip(prompts, batches, strict=True))
    jobs = [{"ids": list(prompt), "batches": [list(batch) for batch in found]} for prompt, found in pairs]
    longest = max(max(len(prompt), sum(map(len, found))) for prompt, found in pairs)
    return [*map(torch.from_numpy, _run(file, "Library", "decode", jobs, longest))]


def _run(
    file: Path, by: str, method: str, jobs: Sequence[dict[str, Any]], context: int = 256, precise: bool = True
) -> list[Any]:
    """Runs a method of a class of the script for each job, which has its arguments, and returns the results."""
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results"), Path(folder, "log.txt")
        task = {"file": str(file), "results": str(results), "threads": torch.get_num_threads(), "precise": precise}
        task |= {"by": by, "method": method, "jobs": jobs, "context": context}
        # Without the variable, llama.cpp starts a debugger when it aborts.
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        with log.open("wb") as output:
            code = subprocess.run(
                [sys.executable, str(_SCRIPT)], input=json.dumps(task).encode(),
                stdout=output, stderr=output, env=environment, check=False,
            ).returncode  # fmt: skip
        if code != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            messages = "\n".join(lines[-8:])
            if code == _CANNOT_LOAD or code < 0:  # A negative code is a signal: llama.cpp has aborted.
                raise UnsupportedError(f"llama.cpp cannot run the file. Its last messages:\n{messages}")
            raise RuntimeError(f"The script that runs llama.cpp has failed:\n{messages}")
        found: list[Any] = pickle.loads(results.read_bytes())
        return found
