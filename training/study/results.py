"""Builds `results.json` of a study."""

from __future__ import annotations

import os
import platform
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc import __version__
from hf_posenc.installation import scripts_folder
from hf_posenc.metrics.images.pictures import DIGITS
from training.machine import processor_name
from training.study.cells import FINISHED, Cell
from training.study.corpus import Corpus
from training.study.settings import StudySettings
from training.study.tasks import IMAGES, StudyTask
from training.study.tasks.task import SHAPE

#: Settings for where and how fast a study runs. They do not change results.
_LOCAL = {"output_dir", "workers", "checkpoint_every", "executor", "executor_options", "report_to"}


def study_results(
    study: StudySettings,
    command: list[str],
    corpus: Corpus | None,
    models: dict[str, str],
    tokenizer: PreTrainedTokenizerBase,
    outcomes: dict[str, dict[str, Any]],
    cells: list[Cell],
) -> dict[str, Any]:
    """Returns the content of `results.json`."""
    tasks = {cell.task.name: cell.task for cell in cells}

    def place(cell: Cell) -> tuple[int, int, int]:
        return study.tasks.index(cell.task.name), study.schemes.index(cell.label), cell.seed

    digits = (None, DIGITS)
    # A resumed study may have used different numbers of workers.
    threads = sorted({run["threads"] for run in outcomes.values() if run["status"] == FINISHED})
    return {
        "name": study.name,
        "description": study.description,
        "settings": study.model_dump(by_alias=True, exclude={*_LOCAL, "save_models"})
        | {"model_name_or_path": _model_name(study)},
        "command": shlex.join(["hf-posenc", "compare", *_repeating(command)]),
        "corpus": None if corpus is None else corpus.summary,
        "tasks": {task.name: _task(study, task, corpus, models[task.name], tokenizer) for task in tasks.values()},
        "runs": [outcomes[cell.name] for cell in sorted(cells, key=place)],
        "versions": {"python": platform.python_version(), "hf-posenc": __version__}
        | {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")}
        | ({"scikit-learn": version("scikit-learn")} if IMAGES in tasks and study.dataset_name in digits else {}),
        "machine": {
            "cpu": processor_name(),
            "cores": os.cpu_count() or 1,
            "threads_per_run": threads[0] if len(threads) == 1 else threads,
        }
        | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def _model_name(study: StudySettings) -> str | None:
    """Returns the name of the pretrained model, without the folder that contains it."""
    return study.model_name_or_path and Path(study.model_name_or_path).name


def _repeating(command: list[str]) -> list[str]:
    """Returns the words of a command that repeats a study on any machine."""
    words, local = [], False
    for word in command:
        if word.startswith("--"):
            local = word.removeprefix("--").partition("=")[0] in _LOCAL
        if not local:
            words.append(word.removeprefix(f"{scripts_folder()}/"))
    return words


def _task(
    study: StudySettings, task: StudyTask, corpus: Corpus | None, model: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    return {
        **task.settings.model_dump(exclude=set(SHAPE) if task.pretrained else None),
        "kind": task.kind,
        "causal": task.causal,
        "model": model,
        "pretrained": _model_name(study) if task.pretrained else None,
        "lengths": task.lengths,
        "train_lengths": task.train_lengths(task.settings),
        **task.facts(study, corpus, tokenizer),
    }
