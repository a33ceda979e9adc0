"""Compares a checkpoint in vLLM with the same checkpoint in transformers.

    python -m tests.kits.engine_agreement FOLDER [FOLDER ...]

vLLM generates greedily after a few prompts and returns the log-probability of each token of the prompts and of its own
text. Transformers then computes the same log-probabilities, and its own greedy text. Each engine runs in a separate
process, in float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little dog who",
    "Water boils at a temperature of 100 degrees because " * 12,
)


def run_vllm(folder: Path, tokens: int) -> list[dict[str, Any]]:
    """Returns what vLLM computes for each prompt: the tokens, those it generated, and their log-probabilities."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(folder), dtype="float32", max_model_len=1024)
    settings = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, prompt_logprobs=0)
    results = []
    for answer in engine.generate(list(PROMPTS), settings, use_tqdm=False):
        generated = list(answer.outputs[0].token_ids)
        of_prompt = [next(iter(choices.values())).logprob for choices in answer.prompt_logprobs[1:]]
        of_text = [choices[token].logprob for choices, token in zip(answer.outputs[0].logprobs, generated, strict=True)]
        results.append({"prompt": answer.prompt_token_ids, "text": generated, "logprobs": of_prompt + of_text})
    return results


def compare(folder: Path, answers: list[dict[str, Any]]) -> tuple[float, bool]:
    """Returns the largest difference of the log-probabilities, and whether transformers generates the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    import hf_posenc  # noqa: F401  (makes patched checkpoints readable)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    difference, same = 0.0, True
    for answer in answers:
        prompt, text = torch.tensor([answer["prompt"]]), torch.tensor([answer["text"]])
        ids = torch.cat((prompt, text), dim=1)
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0]
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        difference = max(difference, (logprobs - torch.tensor(answer["logprobs"])).abs().max().item())
        generated = model.generate(prompt, max_new_tokens=text.shape[1], do_sample=False)[:, prompt.shape[1] :]
        same = same and torch.equal(generated, text)
    return difference, same


def main(arguments: list[str] | None = None) -> None:
    """Prints one line for each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoints, patched or not, with a tokenizer")
    parser.add_argument("--tokens", type=int, default=24, help="number of tokens to generate after each prompt")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.write is not None:
        given.write.write_text(json.dumps(run_vllm(given.folders[0], given.tokens)))
        return
    for folder in given.folders:
        with tempfile.TemporaryDirectory() as temporary:
            answers = Path(temporary, "answers.json")
            # A separate process, because vLLM sets the threads and the memory of its process.
            command = [sys.executable, "-m", __spec__.name, str(folder), "--tokens", str(given.tokens)]
            subprocess.run([*command, "--write", str(answers)], check=True, stdout=sys.stderr)
            difference, same = compare(folder, json.loads(answers.read_text()))
        print(
            f"{folder.name}: largest difference of a log-probability {difference:.1e}, greedy text "
            f"{'equal' if same else 'DIFFERENT'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
