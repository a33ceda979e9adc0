"""Predictions of next tokens, greedy texts, embeddings and times by onnxruntime.

It is run as a script, with numpy, onnxruntime and tokenizers alone: it fails if it has imported torch, transformers or
hf_posenc. It reads a task (JSON) from the standard input and writes the results to the folder that the task names.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

_ABSENT = ("hf_posenc", "torch", "transformers")
#: Tokens of a long prompt that are read at once. The graph computes the logits of all of them.
_CHUNK = 512


class Decoder:
    """A graph with a cache, and one text in it."""

    def __init__(self, session: Any) -> None:
        self.session, self.length, self.past = session, 0, {}
        for given in session.get_inputs():
            if given.name.startswith("past_key_values"):
                self.past[given.name] = np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32)

    def read(self, ids: list[int]) -> np.ndarray:
        """The log-probabilities after each token, `(tokens, vocabulary)`."""
        self.length += len(ids)
        mask = np.ones((1, self.length), np.int64)
        given = {"input_ids": np.array([ids], np.int64), "attention_mask": mask, **self.past}
        logits, *present = self.session.run(None, given)
        self.past = dict(zip(self.past, present, strict=True))
        largest = logits[0].max(-1, keepdims=True)
        shifted = logits[0] - largest
        logprobs: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return logprobs


def predict(session: Any, task: dict[str, Any]) -> dict[str, np.ndarray]:
    """As `in_transformers.predictions`, with a cache: the prompt in pieces, and every later token by itself."""
    by_name: dict[str, list[np.ndarray]] = {"logprobs": [], "best": [], "next": []}
    for window in task["windows"]:
        prompt, last = window[: task["prompt"]], task["prompt"] + task["places"] - 1
        decoder, pieces = Decoder(session), []
        for start in range(0, len(prompt), _CHUNK):
            read = decoder.read(prompt[start : start + _CHUNK])
            pieces.append(read if task["everywhere"] else read[-1:])
        pieces += [decoder.read([token]) for token in window[task["prompt"] : last]]
        logprobs = np.concatenate(pieces)
        by_name["logprobs"].append(logprobs[-task["places"] :])
        if task["everywhere"]:
            by_name["best"].append(logprobs.argmax(-1))
            by_name["next"].append(logprobs[np.arange(last), window[1 : last + 1]])
    return {name: np.stack(arrays) for name, arrays in by_name.items() if arrays}


def greedy(session: Any, task: dict[str, Any]) -> list[str]:
    """As `in_transformers.greedy`."""
    tokenizer, texts = Tokenizer.from_file(task["tokenizer"]), []
    for prompt in task["prompts"]:
        decoder, ids, tokens = Decoder(session), tokenizer.encode(prompt).ids, []
        for _ in range(task["greedy"]):
            logprobs = decoder.read(ids)[-1]
            logprobs[task["ends"]] = -np.inf
            ids = [int(logprobs.argmax())]
            tokens += ids
        texts.append(tokenizer.decode(tokens, skip_special_tokens=False))
    return texts


def embed(session: Any, task: dict[str, Any]) -> np.ndarray:
    """Mean-pooled states of the "passages", which are token ids, as one batch; unit vectors, `(passages, hidden)`."""
    longest = max(map(len, task["passages"]))
    ids, mask = (np.zeros((len(task["passages"]), longest), np.int64) for _ in range(2))
    for row, passage in enumerate(task["passages"]):
        ids[row, : len(passage)], mask[row, : len(passage)] = passage, 1
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    names = [wanted.name for wanted in session.get_inputs()]
    (states,) = session.run(["last_hidden_state"], {name: given[name] for name in names})
    pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    unit: np.ndarray = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    return unit


def timed(session: Any, task: dict[str, Any]) -> dict[str, float]:
    """Milliseconds per token: reading a prompt, and writing after it."""
    prompt, steps = task["windows"][0], task["greedy"]
    Decoder(session).read(prompt[:8])
    decoder, start = Decoder(session), time.perf_counter()
    logprobs = decoder.read(prompt)[-1]
    read = time.perf_counter()
    for _ in range(steps):
        logprobs = decoder.read([int(logprobs.argmax())])[-1]
    end = time.perf_counter()
    return {"reading": 1000 * (read - start) / len(prompt), "writing": 1000 * (end - read) / steps}


def main() -> None:
    """Runs the task."""
    task = json.load(sys.stdin)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task["threads"]
    session = onnxruntime.InferenceSession(task["source"], options, providers=["CPUExecutionProvider"])
    results: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    if task["kind"] == "predict":
        arrays, results["texts"] = predict(session, task), greedy(session, task)
    elif task["kind"] == "embed":
        arrays["embeddings"] = embed(session, task)
    else:
        results["times"] = timed(session, task)
    imported = [name for name in _ABSENT if name in sys.modules]
    if imported:
        raise RuntimeError(f"{imported} were imported, so this process does not show that the graph runs without them.")
    np.savez(Path(task["results"], "arrays.npz"), allow_pickle=False, **arrays)
    Path(task["results"], "found.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
