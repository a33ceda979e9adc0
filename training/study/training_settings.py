"""How one model of a study is built, trained and read."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any, TypeVar

from training.errors import SettingsError

_AT_LEAST_ONE = (
    "length_factor", "hidden_size", "num_layers", "num_heads", "batch_size", "eval_every", "eval_windows",
    "checkpoint_every", "test_samples",
)  # fmt: skip
_NOT_NEGATIVE = ("max_steps", "warmup_steps", "weight_decay")
#: How often a training is saved never changes what comes out of it.
_WITHOUT_EFFECT = ("checkpoint_every",)

Settings = TypeVar("Settings", bound="TrainingSettings")


@dataclass
class TrainingSettings:
    """What a task, or one scheme of a study, can have of its own."""

    train_length: int = field(default=32, metadata={"help": "Tokens per training sequence of text."})
    length_factor: int = field(
        default=4, metadata={"help": "Evaluate text up to this many times the training length. A power of two."}
    )
    train_lengths: str = field(
        default="", metadata={"help": "Lengths a synthetic task is trained on, such as 1-10. Default: the task's own."}
    )
    test_lengths: str = field(
        default="", metadata={"help": "Lengths it is tested on, such as 5,10,12,20. Default: the task's own."}
    )
    test_samples: int = field(default=100, metadata={"help": "Examples per length of a synthetic task."})
    model_type: str = field(
        default="",
        metadata={
            "help": "Architecture of the models, such as qwen3, gpt2 or modernbert. Default: llama, and bert for the "
            "masked task."
        },
    )
    hidden_size: int = field(default=128, metadata={"help": "Width of the models."})
    num_layers: int = field(default=2, metadata={"help": "Layers of the models."})
    num_heads: int = field(default=4, metadata={"help": "Attention heads of the models."})
    max_steps: int = field(
        default=1000,
        metadata={"help": "Optimizer steps of each training. 0, for a scheme that starts from another, only reads."},
    )
    batch_size: int = field(default=32, metadata={"help": "Sequences per step, over all processes together."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak rate of AdamW; cosine decay to zero."})
    warmup_steps: int = field(default=50, metadata={"help": "Steps over which the rate rises to its peak."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens masked in the masked task."})
    eval_every: int = field(default=50, metadata={"help": "Steps between points of the loss curves."})
    eval_windows: int = field(
        default=256, metadata={"help": "Validation windows, each of length_factor x train_length tokens."}
    )
    checkpoint_every: int = field(default=100, metadata={"help": "Steps between checkpoints."})

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it must be at least 1.")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it cannot be negative.")
        if self.train_length < 2:
            raise SettingsError(f"--train_length is {self.train_length}; the next token needs at least 2.")
        if self.length_factor & (self.length_factor - 1):
            raise SettingsError(f"--length_factor is {self.length_factor}; use a power of two: 1, 2, 4, 8, ...")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise SettingsError(
                f"--hidden_size {self.hidden_size} over --num_heads {self.num_heads} gives heads of "
                f"{self.hidden_size / self.num_heads:g} dimensions; rotary encodings need a whole, even number."
            )
        if not 0 < self.mlm_probability < 1:
            raise SettingsError(f"--mlm_probability is {self.mlm_probability}; it must lie between 0 and 1.")
        for name in ("learning_rate", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it must be positive.")
        for name in ("train_lengths", "test_lengths"):
            parse_lengths(name, getattr(self, name))

    @property
    def max_length(self) -> int:
        """The longest evaluated sequence of text, in tokens."""
        return self.train_length * self.length_factor

    @property
    def lengths(self) -> list[int]:
        """Evaluated lengths of text: the training length and its doublings up to `max_length`."""
        return [self.train_length * 2**power for power in range(self.length_factor.bit_length())]

    def changed(self: Settings, changes: dict[str, Any], where: str) -> Settings:
        """A copy with other values.

        Raises:
            SettingsError: for a setting that does not exist, cannot be had here, or has a value of another type.
        """
        known = {setting.name: setting for setting in dataclasses.fields(TrainingSettings)}
        for name, value in changes.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise SettingsError(f"{where} has no setting {name!r}.{hint} It can have: {', '.join(known)}.")
            default = getattr(self, name)
            fits = isinstance(value, (int, float)) if isinstance(default, float) else isinstance(value, type(default))
            if not fits or isinstance(value, bool):
                raise SettingsError(f"{where}: {name} is {value!r}; it takes {type(default).__name__}.")
        try:
            return dataclasses.replace(self, **changes)
        except SettingsError as error:
            raise SettingsError(f"{where}: {error}") from error


def fingerprint(settings: TrainingSettings) -> dict[str, Any]:
    """The settings of one training that must not change while it is under way, JSON-ready."""
    names = [setting.name for setting in dataclasses.fields(TrainingSettings) if setting.name not in _WITHOUT_EFFECT]
    # Left out where it is the default, so that a study from before there was a choice can go on.
    return {name: getattr(settings, name) for name in names if name != "model_type" or settings.model_type}


def parse_lengths(option: str, text: str) -> list[int]:
    """`"1-10,12"` as a list of lengths, ascending; empty for an empty text.

    Raises:
        SettingsError: for what is not a list of positive lengths or ranges.
    """
    lengths: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < 1:
            raise SettingsError(f"--{option} is {text!r}; write lengths and ranges of them: 1-10 or 5,10,20.")
        if dash and int(last) < int(first):
            raise SettingsError(f"--{option} has the range {part}, which ends before it begins.")
        lengths.update(range(int(first), int(last if dash else first) + 1))
    return sorted(lengths)
