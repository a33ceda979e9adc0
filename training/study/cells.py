"""One training of a study: a task, a scheme, a seed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import SettingsError
from training.files import read_json
from training.study.entries import SchemeEntry
from training.study.settings import StudySettings
from training.study.tasks import StudyTask
from training.study.training_settings import TrainingSettings, fingerprint

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
        return self.task.settings.changed(self.entry.training, f"Scheme {self.entry.label!r}")

    @property
    def train_lengths(self) -> list[int]:
        """The lengths it is trained on, which its scheme may have changed."""
        return dataclasses.replace(self.task, settings=self.settings).train_lengths

    @property
    def folder(self) -> Path:
        """Where its checkpoints and its result go."""
        return Path(self.study.output_dir) / "trainings" / self.name

    @property
    def model_folder(self) -> Path:
        """Where its trained model goes."""
        return Path(self.study.output_dir) / "models" / self.name

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
        }

    def identity(self, corpus: dict[str, Any] | None) -> dict[str, Any]:
        """Everything that its result depends on, JSON-ready."""
        identity = {
            **fingerprint(self.settings),
            "scheme": self.entry.config_dict(),
            "evaluated lengths": self.task.lengths,
            "train_lengths": self.task.train_lengths,
            "tokenizer_name": self.study.tokenizer_name,
            "corpus digest": None if corpus is None or self.task.synthetic else corpus["digest"],
        }
        return identity if self.start is None else identity | {"from": self.start.identity(corpus)}


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
    settings = cell.settings
    _check_own_settings(cell)
    if cell.start is None:
        if settings.max_steps == 0:
            raise SettingsError(
                f"{cell.name} is not trained (max_steps is 0) and starts from no other: there would be nothing to read."
            )
        return
    changed = [name for name in _SHAPE if getattr(settings, name) != getattr(cell.start.settings, name)]
    if changed:
        raise SettingsError(f"{cell.name} starts from {cell.start.name} and cannot change its {changed[0]}.")


def _check_own_settings(cell: Cell) -> None:
    """Refuses settings of a scheme that nothing would come of: tables and cards would tell of them."""
    own = sorted(set(cell.entry.training) & set(_OF_THE_TASK))
    if own:
        raise SettingsError(
            f"--scheme_options for {cell.entry.label!r}: training has {own[0]}, but every scheme of a task has the "
            "same kind of model, read alike. Set it for the task in --task_options, or for all."
        )
    if cell.task.synthetic is not None:
        meaningless: tuple[str, ...] = ("train_length", "mlm_probability")
    else:
        meaningless = ("train_lengths", "mlm_probability") if cell.task.causal else ("train_lengths",)
    unused = sorted(set(cell.entry.training) & set(meaningless))
    if unused:
        raise SettingsError(
            f"--scheme_options for {cell.entry.label!r}: training has {unused[0]}, which the task {cell.task.name!r} "
            "does not use. Leave it out, or name the schemes of that task in --task_options."
        )
