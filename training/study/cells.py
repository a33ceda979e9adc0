"""The grid of a study: tasks, schemes, and one cell for each task, scheme and seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_posenc import PositionEncodingError, get_scheme
from hf_posenc.schemes.config import SchemeConfig
from training.checkpoints import scheme_code
from training.errors import SettingsError
from training.files import read_json
from training.study.settings import SchemeOptions, StudySettings, TaskOptions, TrainingSettings
from training.study.tasks import CAUSAL, IMAGES, MASKED, StudyTask, study_task

FINISHED, UNSUPPORTED, DIVERGED, FAILED = "finished", "unsupported", "diverged", "failed"

#: The scheme of the unpatched model, the control.
NATIVE = "native"
#: Used where `--scheme_options` says nothing else. The paper's sinusoids have the size of its token vectors, because it
#: multiplies those by sqrt(hidden) (arXiv:1706.03762, section 3.4). None of the models here does, so the sinusoids are
#: scaled down to the tokens instead: at scale 1 they would drown them.
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {"sinusoidal": {"scale": 0.07}}

_SHAPE = ("hidden_size", "num_layers", "num_heads")
#: The same for all schemes of a task, so that they can be compared.
_OF_THE_TASK = (
    "length_factor", "test_lengths", "test_samples", "eval_windows", "model_type", "config_overrides",
    "test_resolutions", "patch_size",
)  # fmt: skip


def default_options(label: str, asked: SchemeOptions) -> dict[str, Any]:
    """Options of a scheme that a study uses where `scheme_options` says nothing else."""
    return DEFAULT_OPTIONS.get(label, {}) if asked.scheme in (None, label) else {}


@dataclass(frozen=True)
class Cell:
    """One of the trainings of a study.

    Args:
        study: the settings of the whole study.
        task: what is trained.
        label: of the scheme.
        seed: of weights, data order and masks.
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
        """Such as `causal-alibi-seed0`; also the name of its folder."""
        return f"{self.task.name}-{self.label}-seed{self.seed}"

    @property
    def asked(self) -> SchemeOptions:
        """What the study says of its label."""
        return self.study.options_of(self.label, self.task.name)

    @property
    def options(self) -> dict[str, Any]:
        """The options of its scheme."""
        return default_options(self.label, self.asked) | (self.asked.model_extra or {})

    @cached_property
    def config(self) -> SchemeConfig | None:
        """Its scheme; `None` for the unpatched model."""
        scheme = self.asked.scheme or self.label
        try:
            return None if scheme == NATIVE else get_scheme(scheme).from_options(self.options)
        except PositionEncodingError:
            raise
        except (TypeError, ValueError) as error:
            raise SettingsError(f"--scheme_options for {self.label!r}: {error}") from error

    @cached_property
    def settings(self) -> TrainingSettings:
        """How it is trained: the settings of its task, changed by those of its scheme."""
        return self.task.settings.changed(self.asked.training, f"Scheme {self.label!r}")

    @property
    def train_lengths(self) -> list[int]:
        """The lengths it is trained on, which its scheme may have changed."""
        return self.task.train_lengths(self.settings)

    @property
    def goes_on(self) -> bool:
        """Whether it begins with trained weights: those of another cell, or pretrained ones."""
        return self.start is not None or self.task.pretrained

    @property
    def study_folder(self) -> Path:
        """Where the study goes."""
        return Path(self.study.output_dir)

    @property
    def folder(self) -> Path:
        """Where its checkpoints and its result go."""
        return self.study_folder / "trainings" / self.name

    @property
    def model_folder(self) -> Path:
        """Where its trained model goes."""
        return self.study_folder / "models" / self.name

    @property
    def depth(self) -> int:
        """How many trainings have to come before this one."""
        return 0 if self.start is None else self.start.depth + 1

    @property
    def step_file(self) -> Path:
        """Where its worker notes the steps that it has done."""
        return self.folder / "step"

    def steps_done(self) -> int:
        """How many steps its worker has noted."""
        if (self.folder / "result.json").exists():
            return self.settings.max_steps
        try:
            return int(self.step_file.read_text(encoding="utf-8") or 0)
        except FileNotFoundError:
            return 0

    def result(self) -> dict[str, Any] | None:
        """What this training came to, if it has ended."""
        return read_json(self.folder / "result.json")

    def head(self) -> dict[str, Any]:
        """What names it in `results.json`."""
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
        """Everything that its result depends on, JSON-ready."""
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
        identity |= self.task.identity(self, digests)
        if code := scheme_code(self.config):
            identity["code of the scheme"] = code
        return identity if self.start is None else identity | {"from": self.start.identity(digests)}


def study_cells(study: StudySettings) -> list[Cell]:
    """All trainings of a study, seed by seed, so that a study that is stopped has whole seeds to compare.

    One that starts from another comes after it.
    """
    cells: dict[tuple[str, str, int], Cell] = {}

    def add(task: StudyTask, label: str, seed: int, waiting: tuple[str, ...] = ()) -> Cell:
        if label not in study.schemes or label in waiting:
            raise SettingsError(
                f"{' starts from '.join((*waiting, label))}: "
                + ("no training could begin." if label in waiting else "--schemes does not name it; name it, too.")
            )
        key = (task.name, label, seed)
        if key not in cells:
            starts = {name: study.options_of(name, task.name).start for name in study.schemes}
            begins = starts[label]
            start = None if begins is None else add(task, begins, seed, (*waiting, label))
            cells[key] = Cell(study, task, label, seed, start, is_start=label in starts.values())
            _check(cells[key])
        return cells[key]

    if study.train_lengths and {*study.tasks} <= {CAUSAL, MASKED, IMAGES}:
        raise SettingsError("--train_lengths is for synthetic tasks and 'embedding'; text is read at --train_length.")
    for name in study.tasks:
        options = study.task_options.get(name, TaskOptions())
        task = _task(study, name, options)
        for label in study.labels_of(name):
            for seed in study.seeds if options.seeds is None else options.seeds:
                add(task, label, seed)
    _refuse_unused(study, [cell.task for cell in cells.values()])
    return sorted(cells.values(), key=lambda cell: (cell.seed, cell.depth))


def _refuse_unused(study: StudySettings, tasks: list[StudyTask]) -> None:
    """Refuses a setting that no task of the study reads."""
    for name in sorted(study.model_fields_set):
        if all(name in task.unused for task in tasks):
            raise SettingsError(f"--{name} is given, and no task of this study ({', '.join(study.tasks)}) uses it.")


def _task(study: StudySettings, name: str, options: TaskOptions) -> StudyTask:
    settings = study.changed(options.model_extra or {}, f"Task {name!r}")
    task = study_task(name, settings, pretrained=study.model_name_or_path is not None)
    shape = (*_SHAPE, "model_type", "config_overrides")
    sized = [field for field in shape if getattr(settings, field) != TrainingSettings.model_fields[field].default]
    if task.pretrained and sized:
        raise SettingsError(f"Task {name!r} has {sized[0]}, but the models are that of --model_name_or_path.")
    unused = [field for field in task.unused if field in (options.model_extra or {})]
    if unused:
        raise SettingsError(f"Task {name!r} has {unused[0]}, which its trainings do not use.")
    task.check(study)
    return task


def _check(cell: Cell) -> None:
    """Refuses settings with which nothing could be measured, or which would change nothing."""
    settings, swap, task = cell.settings, cell.asked.swap, cell.task
    swap.check_training(settings.max_steps, swap.lora)
    swap.check_objective(task.causal)
    fixed = {*_OF_THE_TASK, *(_SHAPE if cell.goes_on else ()), *task.unused}
    unused = sorted(fixed & set(cell.asked.training))
    problems = {
        f"{NATIVE!r} is the unpatched model; it has no options and takes no swap.": (
            cell.config is None and (cell.options or swap.swaps)
        ),
        f"training has {', '.join(unused)}, which no scheme of this task can have of its own. Set it for the task.": (
            unused
        ),
        "max_steps is 0 and it starts from no other model: there would be nothing to read.": (
            not settings.max_steps and not cell.goes_on
        ),
        f"pose_length is {settings.pose_length}, and no text can skip positions: the longest that it trains on has "
        f"{max(cell.train_lengths)} tokens. Give more, or shorter --train_lengths.": (
            settings.pose_length is not None and settings.pose_length <= max(cell.train_lengths)
        ),
        "swap options have no meaning for new weights: give 'from', or --model_name_or_path for the whole study.": (
            swap.given() and not cell.goes_on
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
