"""A script that runs a GGUF file in llama.cpp. It is a separate process, because llama.cpp aborts on some errors.

It reads a task (JSON) from the standard input and writes the results (JSON) to the file that the task names.
"""

import json
import os
import sys
import urllib.request
from typing import Any

import xllamacpp

#: Exit code if llama.cpp does not load the file.
CANNOT_LOAD = 3


def server(task: dict[str, Any]) -> Any:
    """llama.cpp's server with a cache in float32, so that only the file rounds."""
    options = xllamacpp.CommonParams()
    options.model.path = task["file"]
    options.n_ctx = options.n_batch = task["context"]
    options.n_parallel = 1
    options.warmup = options.fit_params = False
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = task["threads"]
    options.n_gpu_layers = 0
    options.verbosity = 1  # errors only
    if task["precise"]:
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    try:
        return xllamacpp.Server(options)
    except RuntimeError:
        sys.exit(CANNOT_LOAD)  # llama.cpp has written the reason.


def predict(running: Any, prompt: list[int], top: int, cached: bool, letter: int) -> dict[str, Any]:
    """The most probable next tokens and their log-probabilities, in descending order.

    llama.cpp leaves probabilities out of its answer if the new token is an incomplete character. It therefore has to
    choose the token of a letter. The probabilities are those before this choice.
    """
    request = {"prompt": prompt, "n_predict": 1, "n_probs": top, "cache_prompt": cached, "logit_bias": [[letter, 1e9]]}
    answer = _answer(running, request)
    (step,) = answer["choices"][0]["logprobs"]["content"]
    entries, reused = step["top_logprobs"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    if reused != (len(prompt) - 1 if cached else 0):
        raise RuntimeError(f"{reused} of {len(prompt)} tokens were taken from the cache")
    return {"ids": [one["id"] for one in entries], "logprobs": [one["logprob"] for one in entries]}


def predict_all(running: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Predictions after a prompt: the first from all of it, and the others with the cache.

    Each adds a token to the prompt: the next of those that are given, or else the most probable one.
    """
    following = job["following"]
    prompt, found, letter = list(job["prompt"]), [], tokenize(running, "a", special=False)[-1]
    for step in range(job["steps"]):
        found.append(predict(running, prompt, job["top"], step > 0, letter))
        if step + 1 < job["steps"]:
            prompt.append(found[-1]["ids"][0] if following is None else following[step])
    return found


def complete(running: Any, job: dict[str, Any]) -> dict[str, Any]:
    """A greedy continuation as text, with llama.cpp's own timings."""
    answer = _answer(running, {"prompt": job["prompt"], "n_predict": job["steps"], "cache_prompt": False})
    return {"text": answer["choices"][0]["text"], "timings": answer["timings"]}


def _answer(running: Any, request: dict[str, Any]) -> dict[str, Any]:
    greedy = {"temperature": 0.0, "top_k": 1, "repeat_penalty": 1.0, "ignore_eos": True}
    answer: dict[str, Any] = running.handle_completions({**greedy, **request})
    if "choices" not in answer:
        raise RuntimeError(json.dumps(answer))
    return answer


def tokenize(running: Any, text: str, special: bool = True) -> list[int]:
    """The tokens of a text, with the special tokens that the file asks for."""
    body = json.dumps({"content": text, "add_special": special, "parse_special": True}).encode()
    request = urllib.request.Request(
        f"{running.listening_address}/tokenize", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        found: list[int] = json.loads(answer.read())["tokens"]
    return found


def main() -> None:
    """Runs the task."""
    task = json.load(sys.stdin)
    running = server(task)
    results = {
        "predictions": [predict_all(running, job) for job in task["predictions"]],
        "completions": [complete(running, job) for job in task["completions"]],
        "tokens": [tokenize(running, text) for text in task["texts"]],
    }
    with open(task["results"], "w", encoding="utf-8") as file:
        json.dump(results, file)
    # The destructor of the server can wait for its HTTP thread forever, if that thread accepts connections too late.
    os._exit(0)


if __name__ == "__main__":
    main()
