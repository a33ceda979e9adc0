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
from training.objectives import IGNORED
from training.processor import processor_name
from training.study.cells import FINISHED, Cell
from training.study.corpus import Corpus, unigram_cross_entropy
from training.study.reading import tail_tokens
from training.study.settings import StudySettings
from training.study.tasks import StudyTask
from training.study.windows import validation_batch, validation_windows

#: Say where and how fast a study runs, and nothing about what comes out of it.
_WITHOUT_EFFECT = {"output_dir", "overwrite", "workers", "checkpoint_every", "save_models"}
_LOCAL = ("output_dir", "overwrite", "workers", "checkpoint_every")


class ResultsError(ValueError):
    """Results of a study that cannot be reported: a missing key, an unknown status, figures that do not fit."""


class Reading(BaseModel):
    """Figures of one model by length; a list has one entry per length, `None` where there is no number."""

    lengths: list[int]
    loss: list[float | None] = []
    tail_loss: list[float | None] = []
    similarity: list[float | None] = []
    accuracy: list[float | None] = []
    token_accuracy: list[float | None] = []
    sliding_loss: float | None = None
    position_edges: list[int] = []
    position_loss: list[float | None] = []
    reasons: list[str] = []

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        for name in ("loss", "tail_loss", "similarity", "accuracy", "token_accuracy"):
            if len(getattr(self, name)) not in (0, len(self.lengths)):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(self.lengths)} lengths")
        edges, losses = len(self.position_edges), len(self.position_loss)
        if losses and edges != losses + 1:
            raise ValueError(f"{losses} losses by position stand between {edges} edges; expected {losses + 1}")
        return self


class Curve(BaseModel):
    """What was evaluated while training; a model that is only read has no training loss."""

    step: list[int] = Field(min_length=1)
    train_loss: list[float | None]
    validation_loss: list[float] = []
    validation_similarity: list[float] = []

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        for values in (self.train_loss, self.validation_loss, self.validation_similarity):
            if len(values) not in (0, len(self.step)):
                raise ValueError(f"a curve of {len(self.step)} steps has {len(values)} values")
        if not self.validation_loss and not self.validation_similarity:
            raise ValueError("the curve has neither a validation_loss nor a validation_similarity")
        return self


class Dog(BaseModel):
    """The dog test, or why there is none."""

    error: str | None = None
    layers: list[float] = []
    probe: float | None = None
    told_apart: bool | None = None


class Unfinished(BaseModel):
    """A run without figures."""

    task: str
    scheme: str
    config: dict[str, Any] | None
    seed: int
    status: Literal["unsupported", "diverged", "failed"]
    reason: str
    start: str | None = Field(None, alias="from")
    training: dict[str, Any] = {}
    swap_options: dict[str, Any] = {}


class Finished(Unfinished):
    """A run with figures."""

    status: Literal["finished"]  # type: ignore[assignment]
    reason: str = ""
    notes: list[str]
    parameters: int
    seconds: float
    cpu_seconds: float | None
    curve: Curve
    before: Reading | None = None
    by_length: Reading | None = None
    exact_match: Reading | None = None
    dog: Dog | None = None
    swap: dict[str, Any] | None = None
    model: str | None
    threads: int | None = None
    processes: int = 1

    @property
    def reading(self) -> Reading:
        """The figures by length."""
        found = self.by_length or self.exact_match
        assert found is not None
        return found

    @property
    def steps(self) -> int:
        """Steps of this training; 0 for a model that was only read."""
        return self.curve.step[-1]


class Task(BaseModel):
    """What the models of a task are, and how they were trained and read."""

    kind: Literal["language_modeling", "generalization", "embedding"]
    model: str
    lengths: list[int] = Field(min_length=1)
    max_steps: int
    batch_size: int
    learning_rate: float | None = None
    pretrained: str | None = None
    objective: Literal["causal", "masked"] | None = None
    train_length: int | None = None
    tail_tokens: int | None = None
    unigram_cross_entropy: float | None = None
    train_lengths: list[int] = []
    samples: int | None = None
    length_meaning: str | None = None

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        needed = {
            "language_modeling": ("objective", "train_length"),
            "generalization": ("samples", "train_lengths"),
            "embedding": ("train_lengths",),
        }
        missing = [name for name in needed[self.kind] if getattr(self, name) in (None, [])]
        if missing:
            raise ValueError(f"missing {missing[0]!r}, which a task of the kind {self.kind!r} has")
        return self


class CorpusSummary(BaseModel):
    """The text of a study."""

    source: str
    train_documents: int
    validation_documents: int
    train_tokens: int
    validation_tokens: int
    digest: str


class Results(BaseModel):
    """Everything that a study found."""

    name: str
    description: str = ""
    settings: dict[str, Any]
    command: str
    corpus: CorpusSummary | None
    tasks: dict[str, Task]
    runs: list[dict[str, Any]]
    versions: dict[str, str]
    machine: dict[str, Any]


class Study(Results):
    """Results whose runs have been checked."""

    runs: list[Finished | Unfinished]  # type: ignore[assignment]

    def finished(self, task: str) -> list[Finished]:
        """The runs of a task that have figures."""
        return [run for run in self.runs if isinstance(run, Finished) and run.task == task]


def check_results(results: dict[str, Any]) -> Study:
    """Refuses results that would otherwise be reported wrongly.

    Raises:
        ResultsError: with the place and what is expected there.
    """
    plain = _validated(Results, results, "The results")
    runs: list[Finished | Unfinished] = []
    seen: set[tuple[str, str, int]] = set()
    for index, entry in enumerate(plain.runs):
        place = f"runs[{index}] (task {entry.get('task')!r}, scheme {entry.get('scheme')!r}, seed {entry.get('seed')})"
        run = _validated(Finished if entry.get("status") == FINISHED else Unfinished, entry, place)
        if (run.task, run.scheme, run.seed) in seen:
            raise ResultsError(f"{place} is a second run of this kind; the intervals would count it twice.")
        seen.add((run.task, run.scheme, run.seed))
        if run.task not in plain.tasks:
            raise ResultsError(f"{place} is of a task that is not described; described: {', '.join(plain.tasks)}.")
        _check_run(run, plain.tasks[run.task], place)
        runs.append(run)
    return Study.model_construct(**{name: getattr(plain, name) for name in Results.model_fields} | {"runs": runs})


def _validated(kind: Any, entry: dict[str, Any], place: str) -> Any:
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(map(str, found["loc"]))
        if found["type"] == "missing":
            raise ResultsError(f"{place}: missing {where!r}.") from error
        raise ResultsError(f"{place}: {where} is {found['input']!r}: {found['msg']}.") from error


def _check_run(run: Finished | Unfinished, task: Task, place: str) -> None:
    if run.config is not None and not isinstance(run.config.get("scheme"), str):
        raise ResultsError(f"{place}: the config {run.config!r} has no name of a scheme under 'scheme'.")
    if not isinstance(run, Finished):
        return
    name = "exact_match" if task.kind == "generalization" else "by_length"
    reading: Reading | None = getattr(run, name)
    if reading is None:
        raise ResultsError(f"{place}: missing {name!r}.")
    measured = {"language_modeling": "loss", "embedding": "similarity", "generalization": "accuracy"}[task.kind]
    if not getattr(reading, measured):
        raise ResultsError(f"{place}: missing {measured!r} in {name}.")
    if reading.lengths != task.lengths:
        raise ResultsError(f"{place} was measured at {reading.lengths}, but the task has {task.lengths}.")


def study_results(
    study: StudySettings,
    command: list[str],
    corpus: Corpus | None,
    models: dict[str, str],
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
        models: class of the models of each task.
        tokenizer: of all models.
        outcomes: the result of each cell, by name.
        cells: in the order of the results.
        threads: CPU threads that each training had, where its result does not say so itself.
    """
    tasks, labels = list(study.tasks), [entry.label for entry in study.entries]
    ordered = sorted(cells, key=lambda cell: (tasks.index(cell.task.name), labels.index(cell.entry.label), cell.seed))
    # A resumed study may have had several numbers of workers, and the last start may have trained nothing.
    found = sorted({run.get("threads", threads) for run in outcomes.values() if run["status"] == FINISHED})
    return {
        "name": study.name,
        "description": study.description,
        "settings": study.model_dump(exclude=_WITHOUT_EFFECT) | {"model_name_or_path": _model_name(study)},
        "command": shlex.join(["python", *_repeating(command)]),
        "corpus": None if corpus is None else corpus.summary,
        "tasks": {task.name: _task(study, task, corpus, models, tokenizer) for task in study.study_tasks},
        "runs": [outcomes[cell.name] for cell in ordered],
        "versions": {"python": platform.python_version(), "hf-posenc": __version__}
        | {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "machine": {
            "cpu": processor_name(),
            "cores": os.cpu_count() or 1,
            "threads_per_run": found[0] if len(found) == 1 else found or threads,
        }
        | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def _model_name(study: StudySettings) -> str | None:
    """The name of the pretrained model, without the folder it lies in."""
    return study.model_name_or_path and Path(study.model_name_or_path).name


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


def _task(
    study: StudySettings,
    task: StudyTask,
    corpus: Corpus | None,
    models: dict[str, str],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    settings = task.settings
    told = {
        "kind": task.kind,
        "model": models[task.name],
        "lengths": task.lengths,
        "max_steps": settings.max_steps,
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
    }
    if task.pretrained:
        told["pretrained"] = _model_name(study)
    else:
        told |= {name: getattr(settings, name) for name in ("hidden_size", "num_layers", "num_heads")}
    if task.synthetic is not None:
        return told | {
            "train_lengths": task.train_lengths(settings),
            "samples": settings.test_samples,
            "chance": task.synthetic.chance,
            "length_meaning": task.synthetic.length_meaning,
        }
    if task.kind == "embedding":
        return told | {"train_lengths": task.train_lengths(settings)}
    assert corpus is not None
    windows = validation_windows(corpus.validation.tokens(), settings)
    targets = validation_batch(windows, tokenizer, True, settings.mlm_probability)["labels"]
    read = targets[targets != IGNORED].numpy()
    return told | {
        "objective": task.name,
        "train_length": settings.train_length,
        "tail_tokens": tail_tokens(min(settings.train_length, task.lengths[0])),
        "evaluation_tokens": windows.numel(),
        "unigram_cross_entropy": round(unigram_cross_entropy(corpus.train.tokens(), read, len(tokenizer)), 4),
    }
