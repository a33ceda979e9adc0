"""The results of a study as one JSON-ready dictionary."""

from __future__ import annotations

import os
import platform
import shlex
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc import __version__
from training.corpus import Corpus, unigram_cross_entropy
from training.processor import processor_name
from training.study.cells import FINISHED, Cell
from training.study.models import model_class
from training.study.run import tail_tokens
from training.study.settings import StudySettings
from training.study.tasks import StudyTask
from training.study.text import IGNORED, validation_batch, validation_windows

#: Say where and how fast a study runs, and nothing about what comes out of it.
_WITHOUT_EFFECT = ("output_dir", "overwrite", "workers", "checkpoint_every", "save_models")
_LOCAL = ("output_dir", "overwrite", "workers", "checkpoint_every")


def study_results(
    study: StudySettings,
    command: list[str],
    corpus: Corpus | None,
    tokenizer: PreTrainedTokenizerBase,
    outcomes: dict[str, dict[str, Any]],
    cells: list[Cell],
    threads: int,
) -> dict[str, Any]:
    """The content of `results.json`.

    Args:
        study: its settings.
        command: the words that repeat it, without the interpreter.
        corpus: the text; `None` where no task reads any.
        tokenizer: of all models.
        outcomes: the result of each cell, by name.
        cells: in the order of the results.
        threads: CPU threads that each training had, where its result does not say so itself.
    """
    return {
        "name": study.name,
        "settings": {name: value for name, value in study.to_dict().items() if name not in _WITHOUT_EFFECT},
        "command": shlex.join(["python", *_repeating(command)]),
        "corpus": None if corpus is None else corpus.summary,
        "tasks": {task.name: _task(task, corpus, tokenizer) for task in study.study_tasks},
        "runs": [outcomes[cell.name] for cell in _in_order(study, cells)],
        "versions": {"python": platform.python_version(), "hf-posenc": __version__}
        | {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "machine": {
            "cpu": processor_name(),
            "cores": os.cpu_count() or 1,
            "threads_per_run": _threads(outcomes, threads),
        }
        | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def _threads(outcomes: dict[str, dict[str, Any]], otherwise: int) -> int | list[int]:
    """A resumed study may have had several numbers of workers, and the last start may have trained nothing."""
    found = sorted({run.get("threads", otherwise) for run in outcomes.values() if run["status"] == FINISHED})
    return found[0] if len(found) == 1 else found or otherwise


def _repeating(command: list[str]) -> list[str]:
    """The words that repeat a study on any machine: without where and how fast it ran."""
    words: list[str] = []
    waiting = False
    for word in command:
        flag, equals, _ = word.partition("=")
        local = flag.startswith("--") and flag.removeprefix("--") in _LOCAL
        if local or (waiting and not word.startswith("--")):
            waiting = local and not equals
            continue
        waiting = False
        words.append(word)
    return words


def _in_order(study: StudySettings, cells: list[Cell]) -> list[Cell]:
    tasks = [task.name for task in study.study_tasks]
    labels = [entry.label for entry in study.entries]
    return sorted(cells, key=lambda cell: (tasks.index(cell.task.name), labels.index(cell.entry.label), cell.seed))


def _task(task: StudyTask, corpus: Corpus | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    settings = task.settings
    common = {
        "model": model_class(task).__name__,
        "lengths": task.lengths,
        "max_steps": settings.max_steps,
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "hidden_size": settings.hidden_size,
        "num_layers": settings.num_layers,
        "num_heads": settings.num_heads,
    }
    if task.synthetic is not None:
        return common | {
            "kind": "generalization",
            "train_lengths": task.train_lengths,
            "samples": settings.test_samples,
            "chance": task.synthetic.chance,
            "length_meaning": task.synthetic.length_meaning,
        }
    assert corpus is not None
    windows = validation_windows(corpus.validation, settings)
    targets = validation_batch(windows, tokenizer, True, settings.mlm_probability)["labels"]
    frequencies = unigram_cross_entropy(corpus.train, targets[targets != IGNORED].numpy(), len(tokenizer))
    return common | {
        "kind": "language_modeling",
        "objective": task.name,
        "train_length": settings.train_length,
        "tail_tokens": tail_tokens(settings.train_length),
        "evaluation_tokens": windows.numel(),
        "unigram_cross_entropy": round(frequencies, 4),
    }
