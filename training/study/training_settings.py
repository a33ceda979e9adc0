"""How one model of a study is built, trained and read."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from transformers import TrainingArguments

from hf_posenc.errors import close_names
from training.errors import SettingsError

#: Arguments of `Trainer` that the study sets itself, by the setting that says it.
_OWN = {
    "seed": "seeds", "per_device_train_batch_size": "batch_size", "eval_steps": "eval_every", "save_steps":
    "checkpoint_every", "output_dir": "output_dir",
}  # fmt: skip


#: Lengths beyond this one are a slip of the pen.
_LONGEST = 10**6


def parse_lengths(value: Any) -> Any:
    """`"1-10,12"` as a list of lengths, ascending; empty for an empty text.

    Raises:
        ValueError: for what is not a list of positive lengths or ranges.
    """
    lengths: set[int] = set()
    words = value if isinstance(value, list) else [value]
    for part in (part.strip() for word in words for part in str(word).split(",") if part.strip()):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[1]) < 1:
            raise ValueError("write lengths and ranges of them: 1-10 or 5,10,20")
        last = int(match[2] or match[1])
        if last > _LONGEST:
            raise ValueError(f"{part} reaches past {_LONGEST}")
        if last < int(match[1]):
            raise ValueError(f"the range {part} ends before it begins")
        lengths.update(range(int(match[1]), last + 1))
    return sorted(lengths)


Lengths = Annotated[list[int], BeforeValidator(parse_lengths)]


class TrainingSettings(BaseModel):
    """What a task, or one scheme of a study, can have of its own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    train_length: int = Field(32, ge=2, description="Tokens per training sequence of text.")
    length_factor: int = Field(
        4, ge=1, description="Evaluate text up to this many times the training length. A power of two."
    )
    train_lengths: Lengths = Field(
        [],
        description="Lengths a synthetic task is trained on, such as 1-10, or lengths of text that take turns. "
        "Default: the task's own.",
    )
    test_lengths: Lengths = Field(
        [],
        description="Lengths that are evaluated, such as 5,10,12,20. Default: those of the synthetic task; of text, "
        "the training length and its doublings.",
    )
    test_samples: int = Field(100, ge=1, description="Examples per length of a synthetic task.")
    model_type: str = Field(
        "",
        description="Architecture of the models, such as qwen3, gpt2 or modernbert. Default: llama, and bert for the "
        "masked task.",
    )
    hidden_size: int = Field(128, ge=1, description="Width of the models.")
    num_layers: int = Field(2, ge=1, description="Layers of the models.")
    num_heads: int = Field(4, ge=1, description="Attention heads of the models.")
    max_steps: int = Field(
        1000,
        ge=0,
        description="Optimizer steps of each training. 0, for a scheme that starts from another, only reads.",
    )
    batch_size: int = Field(32, ge=1, description="Sequences per step, over all processes together.")
    learning_rate: float = Field(2e-3, gt=0, description="Peak rate of AdamW; cosine decay to zero.")
    warmup_steps: int = Field(50, ge=0, description="Steps over which the rate rises to its peak.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    trainer: dict[str, Any] = Field(
        {}, description="Further arguments of transformers' Trainer: '{lr_scheduler_type: linear, bf16: true}'."
    )
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="Share of tokens masked in the masked task.")
    eval_every: int = Field(50, ge=1, description="Steps between points of the loss curves.")
    eval_windows: int = Field(256, ge=1, description="Validation windows, each of the longest evaluated length.")
    checkpoint_every: int = Field(100, ge=1, description="Steps between checkpoints.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.length_factor & (self.length_factor - 1):
            raise ValueError(f"--length_factor is {self.length_factor}; use a power of two: 1, 2, 4, 8, ...")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"--hidden_size {self.hidden_size} over --num_heads {self.num_heads} gives heads of "
                f"{self.hidden_size / self.num_heads:g} dimensions; rotary encodings need a whole, even number."
            )
        for name in self.trainer:
            if name in _OWN or name in TrainingSettings.model_fields:
                raise ValueError(f"trainer has {name!r}, which a study takes as --{_OWN.get(name, name)}.")
            if name not in TrainingArguments.__dataclass_fields__:
                raise ValueError(f"trainer: {unknown(name, TrainingArguments.__dataclass_fields__)}")
        return self

    @property
    def lengths(self) -> list[int]:
        """Evaluated lengths of text."""
        return self.test_lengths or [self.train_length * 2**power for power in range(self.length_factor.bit_length())]

    @property
    def max_length(self) -> int:
        """The longest evaluated sequence of text, in tokens."""
        return self.lengths[-1]

    def fingerprint(self) -> dict[str, Any]:
        """The settings that must not change while a training is under way, JSON-ready.

        How often it is saved never changes what comes out of it.
        """
        return self.model_dump(exclude={"checkpoint_every"})


def changed_settings(settings: TrainingSettings, changes: dict[str, Any], where: str) -> TrainingSettings:
    """A copy with other values.

    Raises:
        SettingsError: for a setting that does not exist, cannot be had here, or has a value of another type.
    """
    try:
        return TrainingSettings(**settings.model_dump() | changes)
    except ValidationError as error:
        raise settings_error(error, TrainingSettings.model_fields, where) from error


def settings_error(error: ValidationError, known: Any, where: str) -> SettingsError:
    """What pydantic found, in the words of the command line: the first problem, and the nearest name.

    Args:
        error: the refusal.
        known: names of the settings.
        where: of the settings, for the message.
    """
    found = error.errors(include_url=False)[0]
    place = ".".join(map(str, found["loc"]))
    if found["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return SettingsError(f"{where}: {unknown(place, known)}")
    if found["type"] == "value_error" and not place:
        return SettingsError(f"{where}: {found['ctx']['error']}".rstrip(".") + ".")
    message = found["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return SettingsError(f"{where}: --{place} is {found['input']!r}; it {message}.".replace("it it ", "it "))


def unknown(name: str, known: Any) -> str:
    """An unknown setting, with the nearest one."""
    near = close_names(name, list(known))
    return f"unknown setting {name!r}." + (f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}.")
