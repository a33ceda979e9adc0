"""`results.json` of a study: what it has to look like, and how it is put together."""

from __future__ import annotations

import os
import platform
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from hf_posenc import __version__
from hf_posenc.installation import scripts_folder
from hf_posenc.metrics.images.pictures import DIGITS
from training.processor import processor_name
from training.study.cells import FINISHED, Cell
from training.study.corpus import Corpus
from training.study.settings import StudySettings
from training.study.tasks import IMAGES, StudyTask

#: Where and how fast a study runs; none of it changes a result.
_LOCAL = {"output_dir", "workers", "checkpoint_every", "executor", "executor_options", "report_to"}
#: What a model is compared by, for each kind of task.
MAIN = {
    "language_modeling": "loss", "generalization": "accuracy", "embedding": "similarity",
    "image_classification": "accuracy",
}  # fmt: skip


class ResultsError(ValueError):
    """Results of a study that cannot be reported."""


class Run(BaseModel):
    """One training: its place in the study, and either its figures or the reason why there are none."""

    task: str
    scheme: str
    config: dict[str, Any] | None
    seed: int
    status: Literal["finished", "unsupported", "diverged", "failed"]
    reason: str = ""
    start: str | None = Field(None, alias="from")
    training: dict[str, Any] = {}
    swap_options: dict[str, Any] = {}
    notes: list[str] = []
    parameters: int | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = None
    processor: str | None = None
    curve: dict[str, list[float | None]] = {}
    before: dict[str, Any] | None = None
    by_length: dict[str, Any] | None = None
    exact_match: dict[str, Any] | None = None
    by_resolution: dict[str, Any] | None = None
    dog: dict[str, Any] | None = None
    swap: dict[str, Any] | None = None
    model: str | None = None

    @property
    def finished(self) -> bool:
        """Whether it has figures."""
        return self.status == FINISHED

    @property
    def reading(self) -> dict[str, Any]:
        """The figures by length or resolution."""
        return self.by_length or self.exact_match or self.by_resolution or {}

    @property
    def steps(self) -> int | None:
        """Steps of this training; 0 for a model that was only read, `None` without figures."""
        return int(self.curve["step"][-1] or 0) if self.finished else None


class Task(BaseModel, extra="allow"):
    """What the models of a task are, and how they were trained and read."""

    kind: Literal["language_modeling", "generalization", "embedding", "image_classification"]
    model: str
    lengths: list[int] = Field(min_length=1)
    max_steps: int
    batch_size: int
    pretrained: str | None = None
    train_length: int | None = None
    train_lengths: list[int] = []
    tail_tokens: int | None = None
    unigram_cross_entropy: float | None = None
    pictures: dict[str, Any] | None = None
    causal: bool | None = None

    @property
    def causal_reader(self) -> bool:
        """Whether what reads a text has a causal mask; the encoder of an encoder-decoder has none."""
        if self.causal is None:  # results of earlier versions
            read = self.kind in ("language_modeling", "generalization")
            return read and getattr(self, "objective", "causal") == "causal"
        return self.causal

    @property
    def axis(self) -> str:
        """What `lengths` are: "length", or "resolution" of pictures."""
        return "resolution" if self.kind == "image_classification" else "length"

    @property
    def trained(self) -> list[int]:
        """The lengths that were trained on."""
        return self.train_lengths or [self.train_length or self.lengths[0]]


class Study(BaseModel):
    """Everything that a study found."""

    name: str
    description: str = ""
    settings: dict[str, Any]
    command: str
    corpus: dict[str, Any] | None
    tasks: dict[str, Task]
    runs: list[Run]
    versions: dict[str, str]
    machine: dict[str, Any]

    def of(self, task: str, scheme: str | None = None) -> list[Run]:
        """The runs of a task, or of one scheme in it."""
        return [run for run in self.runs if run.task == task and scheme in (None, run.scheme)]

    @model_validator(mode="after")
    def _runs_fit_together(self) -> Self:
        names = [f"task {run.task!r}, scheme {run.scheme!r}, seed {run.seed}" for run in self.runs]
        for name, run in zip(names, self.runs, strict=True):
            if names.count(name) > 1:
                raise ValueError(f"{name} is there twice")
            if run.task not in self.tasks:
                raise ValueError(f"{name}: the tasks are {', '.join(self.tasks)}")
            measured = [MAIN[self.tasks[run.task].kind], "lengths"] if run.finished else []
            missing = [key for key in measured if key not in run.reading]
            if missing or (run.finished and not run.curve.get("step")):
                raise ValueError(f"{name} is finished and has no {(missing or ['curve'])[0]!r}")
            if run.finished and run.reading["lengths"] != self.tasks[run.task].lengths:
                raise ValueError(f"{name} was measured at {run.reading['lengths']}, which are not those of its task")
            first = next(other for other in self.of(run.task, run.scheme) if other.finished or not run.finished)
            compared = ("config", "start", "training", "swap_options", *(["parameters", "steps"] * run.finished))
            for key in compared:
                if getattr(first, key) != getattr(run, key):
                    raise ValueError(
                        f"{name} and seed {first.seed} differ in {key} ({getattr(run, key)!r} and "
                        f"{getattr(first, key)!r}), so they cannot be averaged. Give one of them another label"
                    )
        return self


def check_results(results: dict[str, Any]) -> Study:
    """Reads results, and refuses those that would be reported wrongly.

    Raises:
        ResultsError: with the place and what is expected there.
    """
    try:
        return Study.model_validate(results)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("results", *problem["loc"])))
        raise ResultsError(f"{place}: {problem['msg'].removeprefix('Value error, ')}.") from error


def study_results(
    study: StudySettings,
    command: list[str],
    corpus: Corpus | None,
    models: dict[str, str],
    tokenizer: PreTrainedTokenizerBase,
    outcomes: dict[str, dict[str, Any]],
    cells: list[Cell],
) -> dict[str, Any]:
    """The content of `results.json`.

    Args:
        study: its settings.
        command: the words after `hf-posenc compare` that repeat it.
        corpus: the text; `None` where no task reads any.
        models: class of the models, by task.
        tokenizer: of all models.
        outcomes: the results of the cells, by name.
        cells: all of them.
    """
    tasks = {cell.task.name: cell.task for cell in cells}

    def place(cell: Cell) -> tuple[int, int, int]:
        return study.tasks.index(cell.task.name), study.schemes.index(cell.label), cell.seed

    # A resumed study may have had several numbers of workers.
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
        | ({"scikit-learn": version("scikit-learn")} if _reads_digits(study, tasks) else {}),
        "machine": {
            "cpu": processor_name(),
            "cores": os.cpu_count() or 1,
            "threads_per_run": threads[0] if len(threads) == 1 else threads,
        }
        | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def _reads_digits(study: StudySettings, tasks: dict[str, StudyTask]) -> bool:
    return IMAGES in tasks and study.dataset_name in (None, DIGITS)


def _model_name(study: StudySettings) -> str | None:
    """The name of the pretrained model, without the folder it lies in."""
    return study.model_name_or_path and Path(study.model_name_or_path).name


def _repeating(command: list[str]) -> list[str]:
    """The words that repeat a study on any machine."""
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
    shape = {"hidden_size", "num_layers", "num_heads"} if task.pretrained else set()
    return {
        **task.settings.model_dump(exclude=shape),
        "kind": task.kind,
        "causal": task.causal,
        "model": model,
        "pretrained": _model_name(study) if task.pretrained else None,
        "lengths": task.lengths,
        "train_lengths": task.train_lengths(task.settings),
        **task.facts(study, corpus, tokenizer),
    }
