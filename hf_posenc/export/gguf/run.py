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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError

#: The script that runs llama.cpp, and its exit code if llama.cpp does not load the file.
_SCRIPT, _CANNOT_LOAD = Path(__file__).with_name("in_llama_cpp.py"), 3


def runtime() -> str:
    """The program that runs the files, with its version."""
    return f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})"


def tokenize(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts.

    Raises:
        UnsupportedError: if llama.cpp cannot read the file.
    """
    return _run(file, "tokenize", [{"text": text} for text in texts])


def encode(file: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The last hidden states of an encoder, computed in float32, so that only the file rounds.

    Args:
        file: the GGUF file of the model.
        prompts: token ids.

    Returns:
        For each prompt, `(2, tokens, width)` float32: from `llama_encode`, and from `llama_decode`, which llama.cpp's
        server calls.

    Raises:
        UnsupportedError: if llama.cpp cannot run the file.
    """
    jobs = [{"ids": list(prompt)} for prompt in prompts]
    return [*map(torch.from_numpy, _run(file, "encode", jobs, max(map(len, prompts))))]


def decode(
    file: Path,
    batches: Sequence[Sequence[Sequence[int]]],
    steps: int = 0,
    *,
    encoded: Sequence[Sequence[int]] | None = None,
    precise: bool = True,
    without: Sequence[int] = (),
) -> list[Tensor]:
    """The logits of a decoder.

    Args:
        file: the GGUF file of the model.
        batches: for each text, its token ids in batches. All but the first batch use the cache.
        steps: number of tokens after these, each the most probable one.
        encoded: for each text, token ids of the encoder in front of the decoder.
        precise: whether everything is computed in float32, so that only the file rounds. If false, as by default, the
            cache is float16, and llama.cpp decides whether it uses flash attention.
        without: tokens that are never chosen; their logits are minus infinity.

    Returns:
        For each text, the logits after each batch and step, `(batches + steps, vocabulary)` float32.

    Raises:
        UnsupportedError: if llama.cpp cannot run the file.
    """
    pairs = list(zip([[]] * len(batches) if encoded is None else encoded, batches, strict=True))
    same = {"steps": steps, "without": list(without)}
    jobs = [{"ids": list(ids), "batches": [list(batch) for batch in tokens], **same} for ids, tokens in pairs]
    longest = max(max(len(ids), sum(map(len, tokens)) + steps) for ids, tokens in pairs)
    return [*map(torch.from_numpy, _run(file, "decode", jobs, longest, precise))]


def _run(
    file: Path, method: str, jobs: Sequence[dict[str, Any]], context: int = 256, precise: bool = True
) -> list[Any]:
    """Runs a method of the script's `Library` with the arguments in each job, and returns the results."""
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results"), Path(folder, "log.txt")
        task = {"file": str(file), "results": str(results), "threads": torch.get_num_threads(), "precise": precise}
        task |= {"method": method, "jobs": jobs, "context": context}
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
                reasons = [line for line in lines if "error loading model: " in line or "GGML_ASSERT" in line]
                reason = reasons[-1] if reasons else "it ended without an error message"
                raise UnsupportedError(
                    f"llama.cpp cannot run the file: {reason}. Its code does not support these sizes or this "
                    "vocabulary, or there is too little memory. Export to 'onnx', or use another model of this "
                    f"architecture. Its last messages:\n{messages}"
                )
            raise RuntimeError(
                f"The script that calls {runtime()} failed, and the model is not the cause. Install the version of "
                f"xllamacpp in constraints.txt, with which hf_posenc was tested.\n{messages}"
            )
        return pickle.loads(results.read_bytes())
