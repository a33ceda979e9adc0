"""One training of a study: a task, a scheme, a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import SettingsError
from training.files import read_json
from training.study.entries import SchemeEntry
from training.study.settings import StudySettings
from training.study.tasks import EMBEDDING, MASKED, StudyTask
from training.study.training_settings import TrainingSettings, changed_settings

FINISHED, UNSUPPORTED, DIVERGED, FAILED = "finished", "unsupported", "diverged", "failed"

#: Which models there are and how they are read, which one table can only tell once.
_OF_THE_TASK = ("length_factor", "test_lengths", "test_samples", "eval_windows", "model_type")
_SHAPE = ("hidden_size", "num_layers", "num_heads")


@dataclass(frozen=True)
class Cell:
    """One of the trainings of a study.

    Args:
        study: the settings of the whole study.
        task: what is trained.
        entry: the scheme.
        seed: of weights, data order and masks.
        start: the cell whose trained model this one starts from.
        is_start: whether another cell starts from this one.
    """

    study: StudySettings
    task: StudyTask
    entry: SchemeEntry
    seed: int
    start: Cell | None = None
    is_start: bool = False

    @property
    def name(self) -> str:
        """Such as `causal-alibi-seed0`; also the name of its folder."""
        return f"{self.task.name}-{self.entry.label}-seed{self.seed}"

    @property
    def settings(self) -> TrainingSettings:
        """How it is trained: the settings of its task, changed by those of its scheme."""
        return changed_settings(self.task.settings, self.entry.training, f"Scheme {self.entry.label!r}")

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
    def keeps_model(self) -> bool:
        """Whether its trained model is wanted, by the user or by a training that starts from it."""
        return self.study.save_models or self.is_start

    @property
    def depth(self) -> int:
        """How many trainings have to come before this one."""
        return 0 if self.start is None else self.start.depth + 1

    def result(self) -> dict[str, Any] | None:
        """What this training came to, if it has ended."""
        result: dict[str, Any] | None = read_json(self.folder / "result.json")
        return result

    def head(self) -> dict[str, Any]:
        """What names it in `results.json`."""
        return {
            "task": self.task.name,
            "scheme": self.entry.label,
            "config": self.entry.config_dict(),
            "seed": self.seed,
            "from": self.entry.start,
            "training": self.entry.training,
        } | ({"swap_options": self.entry.given} if self.entry.given else {})

    def identity(self, digests: dict[str, str]) -> dict[str, Any]:
        """Everything that its result depends on, JSON-ready.

        Args:
            digests: of the text ("corpus") and of pretrained weights ("model"), where there are any.
        """
        identity = {
            **self.settings.fingerprint(),
            "scheme": self.entry.config_dict(),
            "swap": self.entry.given,
            "evaluated lengths": self.task.lengths,
            "train_lengths": self.train_lengths,
            "tokenizer_name": self.study.tokenizer_name,
            "corpus digest": None if self.task.synthetic else digests.get("corpus"),
            "model digest": digests.get("model"),
        }
        return identity if self.start is None else identity | {"from": self.start.identity(digests)}


def study_cells(study: StudySettings) -> list[Cell]:
    """All trainings of a study; one that starts from another comes after it.

    Raises:
        UnknownNameError: for an unknown scheme or option.
        SettingsError: for a task or setting that cannot be had.
    """
    by_label = {entry.label: entry for entry in study.entries}
    starts = {entry.start for entry in study.entries}
    cells: dict[tuple[str, str, int], Cell] = {}

    def add(task: StudyTask, entry: SchemeEntry, seed: int) -> Cell:
        key = (task.name, entry.label, seed)
        if key not in cells:
            start = None if entry.start is None else add(task, by_label[entry.start], seed)
            cells[key] = Cell(study, task, entry, seed, start, is_start=entry.label in starts)
            _check(cells[key])
        return cells[key]

    for task in study.study_tasks:
        for entry in study.entries_of(task.name):
            for seed in study.seeds_of(task.name):
                add(task, entry, seed)
    return sorted(cells.values(), key=lambda cell: cell.depth)


def _check(cell: Cell) -> None:
    settings, swap = cell.settings, cell.entry.swap
    _check_own_settings(cell)
    if not cell.goes_on:
        if settings.max_steps == 0:
            raise SettingsError(
                f"{cell.name} is not trained (max_steps is 0) and starts from no other: there would be nothing to read."
            )
        if cell.entry.given:
            raise SettingsError(
                f"{cell.name} has swap options and new weights, in which there is nothing to take over: give 'from', "
                "or --model_name_or_path for the whole study."
            )
    swap.check_steps(settings.max_steps)
    if swap.lora and swap.gradual_steps:
        raise SettingsError(
            f"{cell.name}: gradual_steps changes what the frozen weights have to do from step to step, which lora "
            "cannot follow; use one of them."
        )
    if settings.max_steps == 0 and (swap.lora or swap.distill):
        raise SettingsError(f"{cell.name} is not trained (max_steps is 0), so lora and distill have no meaning.")
    if cell.task.name == EMBEDDING and (swap.lora or swap.distill):
        raise SettingsError(f"{cell.name}: the task {EMBEDDING!r} always has a teacher, and takes no lora.")
    changed = [name for name in _SHAPE if cell.start and getattr(settings, name) != getattr(cell.start.settings, name)]
    if changed:
        raise SettingsError(f"{cell.name} goes on from another model and cannot change its {changed[0]}.")


def _check_own_settings(cell: Cell) -> None:
    """Refuses settings of a scheme that nothing would come of: tables and cards would tell of them."""
    where, given = f"--scheme_options for {cell.entry.label!r}", set(cell.entry.training)
    own = sorted(given & {*_OF_THE_TASK, *(_SHAPE if cell.task.pretrained else ())})
    if own:
        raise SettingsError(
            f"{where}: training has {own[0]}, but every scheme of a task has the same kind of model, read alike. Set "
            "it for the task in --task_options, or for all."
        )
    unused_names = {"train_length"} if cell.task.synthetic is not None else {"train_lengths"}
    unused_names |= {"mlm_probability"} if cell.task.name != MASKED else set()
    unused = sorted(given & (unused_names - ({"train_lengths"} if cell.task.name == EMBEDDING else set())))
    if unused:
        raise SettingsError(
            f"{where}: training has {unused[0]}, which the task {cell.task.name!r} does not use. Leave it out, or name "
            "the schemes of that task in --task_options."
        )
