"""The tasks of a study."""

from __future__ import annotations

from dataclasses import dataclass

from hf_posenc.errors import close_names
from hf_posenc.metrics.generalization import SYNTHETIC_TASKS, SyntheticTask
from training.errors import SettingsError
from training.study.training_settings import TrainingSettings

CAUSAL, MASKED, EMBEDDING = "causal", "masked", "embedding"
#: Fewer tokens have no tail to speak of, and leave no room between the special tokens of a sentence.
_SHORTEST = 8
#: What a pretrained model has by itself.
_SIZES = ("model_type", "hidden_size", "num_layers", "num_heads")


@dataclass(frozen=True)
class StudyTask:
    """What the models of a study are trained on.

    Args:
        name: "causal", "masked", "embedding", or that of a synthetic task.
        settings: of its trainings.
        synthetic: the synthetic task; `None` for text.
        pretrained: whether its models begin with pretrained weights.
    """

    name: str
    settings: TrainingSettings
    synthetic: SyntheticTask | None = None
    pretrained: bool = False

    @property
    def causal(self) -> bool:
        """Whether its models predict the next token."""
        return self.name not in (MASKED, EMBEDDING)

    @property
    def kind(self) -> str:
        """What is measured: "language_modeling", "embedding" or "generalization"."""
        if self.synthetic is not None:
            return "generalization"
        return EMBEDDING if self.name == EMBEDDING else "language_modeling"

    def train_lengths(self, settings: TrainingSettings) -> list[int]:
        """The lengths that are trained on, with the settings of the task or of one scheme."""
        if self.synthetic is None:
            return settings.train_lengths or [settings.train_length]
        return settings.train_lengths or list(self.synthetic.train_lengths)

    @property
    def lengths(self) -> list[int]:
        """The lengths it is evaluated at."""
        if self.synthetic is None:
            return self.settings.lengths
        return self.settings.test_lengths or list(self.synthetic.test_lengths)


def parse_task(name: str, settings: TrainingSettings, pretrained: bool = False) -> StudyTask:
    """A task by name.

    Raises:
        SettingsError: for an unknown name, or one that needs other models.
    """
    defaults = TrainingSettings()
    sized = [size for size in _SIZES if pretrained and getattr(settings, size) != getattr(defaults, size)]
    if sized:
        raise SettingsError(f"Task {name!r} has {sized[0]}, but the models are that of --model_name_or_path.")
    if name == EMBEDDING and not pretrained:
        raise SettingsError(f"The task {name!r} keeps what a trained encoder says: give --model_name_or_path.")
    if name in (CAUSAL, MASKED, EMBEDDING):
        if min(settings.lengths) < _SHORTEST and (settings.test_lengths or pretrained):
            raise SettingsError(f"Task {name!r}: evaluated lengths of text are at least {_SHORTEST} tokens.")
        return StudyTask(name, settings, None, pretrained)
    if name not in SYNTHETIC_TASKS:
        known = [CAUSAL, MASKED, EMBEDDING, *SYNTHETIC_TASKS]
        near = close_names(name, known)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"Unknown task {name!r} in --tasks.{hint} Known: {', '.join(known)}.")
    return StudyTask(name, settings, SYNTHETIC_TASKS[name], pretrained)
