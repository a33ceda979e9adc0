"""The grid of a study: tasks, schemes, and one cell for each task, scheme and seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_posenc import get_scheme
from hf_posenc.schemes.config import SchemeConfig
from training.checkpoints import scheme_code
from training.errors import SettingsError, settings_errors
from training.files import read_json
from training.study.settings import SchemeOptions, StudySettings, TaskOptions, TrainingSettings
from training.study.tasks import StudyTask, study_task
from training.study.tasks.task import SHAPE

FINISHED, UNSUPPORTED, DIVERGED, FAILED = "finished", "unsupported", "diverged", "failed"

#: The scheme of the unpatched model, the control.
NATIVE = "native"
#: Defaults for `--scheme_options`. The paper's sinusoids have the size of its token vectors, because it multiplies
#: those by sqrt(hidden) (arXiv:1706.03762, section 3.4). The models here do not, so the sinusoids are scaled down
#: instead. At scale 1 they would be much larger than the token vectors.
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {"sinusoidal": {"scale": 0.07}}

#: Settings that must be the same for all schemes of a task, so that they can be compared.
_OF_THE_TASK = (
    "length_factor", "test_lengths", "test_samples", "eval_windows", "model_type", "config_overrides",
    "test_resolutions", "patch_size",
)  # fmt: skip


def default_options(label: str, asked: SchemeOptions) -> dict[str, Any]:
    """Returns the options of a scheme that a study uses unless `scheme_options` changes them."""
    return DEFAULT_OPTIONS.get(label, {}) if asked.scheme in (None, label) else {}


@dataclass(frozen=True)
class Cell:
    """One of the training runs of a study.

    Args:
        study: the settings of the whole study.
        task: the task to train.
        label: the label of the scheme.
        seed: the seed of weights, data order and masks.
        start: the cell whose trained model this one starts from.
        is_start: whether another cell starts from this one.
    """

    study: StudySettings
    task: StudyTask
    label: str
    seed: int
    start: Cell | None = None
    is_start: bool = False

    @property
    def name(self) -> str:
        """Its name, such as `causal-alibi-seed0`, and that of its folder."""
        return f"{self.task.name}-{self.label}-seed{self.seed}"

    @property
    def asked(self) -> SchemeOptions:
        """The options of its label in the study."""
        return self.study.options_of(self.label, self.task.name)

    @property
    def options(self) -> dict[str, Any]:
        """The options of its scheme."""
        return default_options(self.label, self.asked) | (self.asked.model_extra or {})

    @cached_property
    def config(self) -> SchemeConfig | None:
        """Its scheme; `None` for the unpatched model."""
        scheme = self.asked.scheme or self.label
        if scheme == NATIVE:
            return None
        kind = get_scheme(scheme)
        with settings_errors(f"--scheme_options for {self.label!r}", TypeError, ValueError):
            return kind.from_options(self.options)

    @cached_property
    def settings(self) -> TrainingSettings:
        """The settings of its training: those of its task, changed by those of its scheme."""
        return self.task.settings.changed(self.asked.training, f"Scheme {self.label!r}")

    @property
    def train_lengths(self) -> list[int]:
        """The lengths that it is trained on. Its scheme may have changed them."""
        return self.task.train_lengths(self.settings)

    @property
    def goes_on(self) -> bool:
        """Whether it starts from trained weights: those of another cell, or pretrained ones."""
        return self.start is not None or self.task.pretrained

    @property
    def study_folder(self) -> Path:
        """The output folder of the study."""
        return Path(self.study.output_dir)

    @property
    def folder(self) -> Path:
        """The folder for its checkpoints and its result."""
        return self.study_folder / "trainings" / self.name

    @property
    def model_folder(self) -> Path:
        """The folder for its trained model."""
        return self.study_folder / "models" / self.name

    @property
    def depth(self) -> int:
        """The number of training runs that must end before this one."""
        return 0 if self.start is None else self.start.depth + 1

    @property
    def step_file(self) -> Path:
        """The file in which its worker records the number of completed steps."""
        return self.folder / "step"

    def steps_done(self) -> int:
        """Returns the number of steps that its worker has recorded."""
        if (self.folder / "result.json").exists():
            return self.settings.max_steps
        try:
            return int(self.step_file.read_text(encoding="utf-8") or 0)
        except FileNotFoundError:
            return 0

    def result(self) -> dict[str, Any] | None:
        """Returns the result of this training, if it has ended."""
        return read_json(self.folder / "result.json")

    def head(self) -> dict[str, Any]:
        """The entries that identify it in `results.json`."""
        return {
            "task": self.task.name,
            "scheme": self.label,
            "config": None if self.config is None else self.config.to_dict(),
            "seed": self.seed,
            "from": self.asked.start,
            "training": self.asked.training,
            "swap_options": self.asked.swap.given(),
        }

    def identity(self, digests: dict[str, str]) -> dict[str, Any]:
        """Returns everything that its result depends on, JSON-ready."""
        identity = {
            **self.settings.fingerprint(),
            "scheme": self.head()["config"],
            "swap": self.asked.swap.given(),
            "evaluated lengths": self.task.lengths,
            "train_lengths": self.train_lengths,
            "tokenizer_name": self.study.tokenizer_name,
            "corpus digest": digests.get("corpus") if self.task.reads_text else None,
            "model digest": digests.get("model"),
        }
        identity |= self.task.identity(self, digests) | scheme_code(self.config)
        return identity if self.start is None else identity | {"from": self.start.identity(digests)}


def study_cells(study: StudySettings) -> list[Cell]:
    """Returns all training runs of a study, ordered by seed, so that an interrupted study has complete seeds.

    A training that starts from another one comes after it.
    """
    cells: dict[tuple[str, str, int], Cell] = {}

    def add(task: StudyTask, label: str, seed: int, waiting: tuple[str, ...] = ()) -> Cell:
        if label not in study.schemes or label in waiting:
            raise SettingsError(
                f"{' starts from '.join((*waiting, label))}: "
                + ("no training could begin." if label in waiting else "--schemes must include it, too.")
            )
        key = (task.name, label, seed)
        if key not in cells:
            starts = {name: study.options_of(name, task.name).start for name in study.schemes}
            begins = starts[label]
            start = None if begins is None else add(task, begins, seed, (*waiting, label))
            cells[key] = Cell(study, task, label, seed, start, is_start=label in starts.values())
            _check(cells[key])
        return cells[key]

    for name in study.tasks:
        options = study.task_options.get(name, TaskOptions())
        task = _task(study, name, options)
        for label in study.labels_of(name):
            for seed in options.seeds or study.seeds:
                add(task, label, seed)
    if not study._for_rates:  # the study that it is for was checked, and has other tasks, too
        _refuse_unused(study, list(cells.values()))
    return sorted(cells.values(), key=lambda cell: (cell.seed, cell.depth))


def _refuse_unused(study: StudySettings, cells: list[Cell]) -> None:
    """Raises `SettingsError` for a setting of the study that none of its training runs uses."""

    def reason(name: str, cell: Cell) -> str | None:
        if name in cell.task.unused or name not in study._flags:
            return cell.task.unused.get(name)
        hidden = {*cell.asked.training, *study.task_options.get(cell.task.name, TaskOptions()).model_fields_set}
        return "task_options and scheme_options replace it in every training" if name in hidden else None

    for name in sorted(study._flags if study._is_part else study.model_fields_set):
        reasons = {reason(name, cell) for cell in cells}
        if None not in reasons:
            raise SettingsError(
                f"--{name} is given, but no task of this study ({', '.join(study.tasks)}) uses it: "
                f"{'; '.join(sorted(filter(None, reasons)))}."
            )


def _task(study: StudySettings, name: str, options: TaskOptions) -> StudyTask:
    settings = study.changed(options.model_extra or {}, f"Task {name!r}")
    task = study_task(name, settings, pretrained=study.model_name_or_path is not None)
    for field, reason in task.unused.items():
        if field in (options.model_extra or {}):
            raise SettingsError(f"Task {name!r} has {field}, which its training runs do not use: {reason}.")
    task.check(study)
    return task


def _check(cell: Cell) -> None:
    """Raises `SettingsError` for settings with which nothing could be measured, or which have no effect."""
    settings, swap, task = cell.settings, cell.asked.swap, cell.task
    swap.check_training(settings.max_steps, swap.lora)
    given = sorted(cell.asked.training)
    unused = [f"{name}, which its training does not use: {task.unused[name]}" for name in given if name in task.unused]
    if not settings.max_steps:
        unused += [f"{name}, but max_steps is 0, so it does not train" for name in given if name != "max_steps"]
    fixed = {*_OF_THE_TASK, *(SHAPE if cell.goes_on else ())} & set(given)
    problems = {
        f"training has {next(iter(unused), None)}.": unused,
        f"{NATIVE!r} is the unpatched model; it has no options and cannot be a swap.": (
            cell.config is None and (cell.options or swap.swaps)
        ),
        f"training has {', '.join(sorted(fixed))}, which a single scheme of this task cannot set. Set it for the "
        "task.": fixed,
        "max_steps is 0 and it starts from new weights, so there would be nothing to evaluate.": (
            not settings.max_steps and not cell.goes_on
        ),
        f"pose_length is {settings.pose_length}, but no text could skip positions: the longest training text has "
        f"{max(cell.train_lengths)} tokens. Give more, or shorter --train_lengths.": (
            settings.pose_length is not None and settings.pose_length <= max(cell.train_lengths)
        ),
        "swap options have no meaning for new weights: give 'from', or --model_name_or_path for the whole study.": (
            swap.given() and not cell.goes_on
        ),
        "self_distill compares predictions of the next token, so it is for the task 'causal'.": (
            swap.self_distill and not task.causal
        ),
        "lora, distill and self_distill have no meaning without training (max_steps is 0).": (
            not settings.max_steps and (swap.lora or swap.teaches)
        ),
    }
    if refusal := task.refusal(swap):
        problems[refusal] = True
    for message, applies in problems.items():
        if applies:
            raise SettingsError(f"{cell.name}: {message}")
