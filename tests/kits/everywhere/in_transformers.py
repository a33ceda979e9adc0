"""Predictions of next tokens, and greedy texts, by transformers.

As a script it is a process of its own, which fails if it has imported hf_posenc. It reads a task (JSON) from the
standard input and writes the results to the folder that the task names.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def predictions(model: Any, task: dict[str, Any]) -> dict[str, np.ndarray]:
    """The model's predictions on pieces of text, each in one call without a cache.

    Args:
        model: in float32.
        task: "windows", lists of token ids of one length; "prompt" and "places", of `Plan`; "everywhere", whether all
            tokens of a window are predicted, and not only those of the places.

    Returns:
        "logprobs", `(windows, places, vocabulary)`; if everywhere, "best" and "next", `(windows, length - 1)`: the most
        probable token, and the log-probability of the token that follows.
    """
    by_name: dict[str, list[np.ndarray]] = {"logprobs": [], "best": [], "next": []}
    for window in task["windows"]:
        ids = torch.tensor([window[: task["prompt"] + task["places"] - 1]])
        keep = 0 if task["everywhere"] else task["places"]
        logprobs = model(ids, use_cache=False, logits_to_keep=keep).logits[0].float().log_softmax(-1)
        by_name["logprobs"].append(logprobs[-task["places"] :].numpy())
        if task["everywhere"]:
            by_name["best"].append(logprobs.argmax(-1).numpy())
            following = torch.tensor(window[1 : len(logprobs) + 1])
            by_name["next"].append(logprobs.gather(-1, following[:, None])[:, 0].numpy())
    return {name: np.stack(arrays) for name, arrays in by_name.items() if arrays}


def greedy(model: Any, tokenizer: Any, task: dict[str, Any]) -> list[str]:
    """The texts of "greedy" tokens that `generate` writes after each of the "prompts". The end of a text is no end."""
    texts = []
    for prompt in task["prompts"]:
        given = tokenizer(prompt, return_tensors="pt")
        count = task["greedy"]
        ids = model.generate(**given, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        texts.append(tokenizer.decode(ids[0, given["input_ids"].shape[1] :]))
    return texts


def main() -> None:
    """Runs the task."""
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(task["source"], dtype=torch.float32).eval()
    np.savez(Path(task["results"], "arrays.npz"), allow_pickle=False, **predictions(model, task))
    texts = greedy(model, AutoTokenizer.from_pretrained(task["source"]), task)
    if "hf_posenc" in sys.modules:
        raise RuntimeError("hf_posenc was imported, so this process does not show that the model runs without it.")
    Path(task["results"], "found.json").write_text(json.dumps({"texts": texts}))


if __name__ == "__main__":
    main()
