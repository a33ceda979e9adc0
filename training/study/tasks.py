"""The tasks of a study."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hf_posenc.metrics.generalization import SYNTHETIC_TASKS, SyntheticTask
from training.errors import SettingsError
from training.study.training_settings import TrainingSettings, parse_lengths

CAUSAL, MASKED = "causal", "masked"


@dataclass(frozen=True)
class StudyTask:
    """What the models of a study are trained on.

    Args:
        name: "causal", "masked", or that of a synthetic task.
        settings: of its trainings.
        synthetic: the synthetic task; `None` for text.
    """

    name: str
    settings: TrainingSettings
    synthetic: SyntheticTask | None = None

    @property
    def causal(self) -> bool:
        """Whether its models predict the next token."""
        return self.name != MASKED

    @property
    def train_lengths(self) -> list[int]:
        """The lengths a synthetic task is trained on; that of text is one."""
        if self.synthetic is None:
            return [self.settings.train_length]
        return parse_lengths("train_lengths", self.settings.train_lengths) or list(self.synthetic.train_lengths)

    @property
    def lengths(self) -> list[int]:
        """The lengths it is evaluated at."""
        if self.synthetic is None:
            return self.settings.lengths
        return parse_lengths("test_lengths", self.settings.test_lengths) or list(self.synthetic.test_lengths)


def parse_task(name: str, settings: TrainingSettings) -> StudyTask:
    """A task by name.

    Raises:
        SettingsError: for an unknown name.
    """
    if name in (CAUSAL, MASKED):
        return StudyTask(name, settings)
    if name not in SYNTHETIC_TASKS:
        known = [CAUSAL, MASKED, *SYNTHETIC_TASKS]
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"Unknown task {name!r} in --tasks.{hint} Known: {', '.join(known)}.")
    return StudyTask(name, settings, SYNTHETIC_TASKS[name])
