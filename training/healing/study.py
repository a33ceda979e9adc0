"""What a healing study compares: swaps, how each is healed, and the control."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from training.argument_files import parse_arguments, parse_structured
from training.arguments import DataArguments, LoraArguments, ModelArguments, RunArguments, SchemeArguments
from training.errors import SettingsError
from training.healing.arguments import HealingArguments
from training.language_modeling import RunInput

OBJECTIVES = ("causal", "masked", "embedding")

#: What one table can only tell once: a cell cannot have its own.
_OF_THE_STUDY = (
    "cells", "objective", "seeds", "seed", "lengths", "eval_windows", "output_dir", "keep_models", "description",
    "imports",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+,()-]*")


@dataclass
class StudyArguments:
    """Which swaps are compared, and how they are measured. All other options are those of one run."""

    cells: str = field(
        default="[]",
        metadata={
            "help": "What is compared: a list of mappings, each with a name and the options in which it differs, such "
            "as {name: alibi gradual, scheme: alibi, gradual_steps: 40}. The one without a scheme is the control."
        },
    )
    objective: str = field(
        default="causal",
        metadata={
            "help": "Loss of the next token, loss of masked tokens, or the hidden states of the model before the swap.",
            "choices": list(OBJECTIVES),
        },
    )
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Every cell is trained once for each."})
    lengths: list[int] = field(
        default_factory=lambda: [128], metadata={"help": "Evaluated lengths in tokens, before and after the training."}
    )
    train_lengths: list[int] = field(
        default_factory=list,
        metadata={"help": "Objective 'embedding': lengths of the batches, in turn. Default: --block_size."},
    )
    eval_windows: int = field(default=8, metadata={"help": "Windows of the greatest length that are evaluated."})
    keep_models: bool = field(default=False, metadata={"help": "Keep the trained models, not only their figures."})
    description: str = field(default="", metadata={"help": "A sentence above the table."})

    def __post_init__(self) -> None:
        if not self.seeds or not self.lengths or min(self.lengths) < 8:
            raise SettingsError("--seeds and --lengths each need an entry, and lengths are at least 8 tokens.")
        if self.eval_windows < 1:
            raise SettingsError(f"--eval_windows is {self.eval_windows}; expected 1 or more.")
        if self.train_lengths and self.objective != "embedding":
            raise SettingsError("--train_lengths is for --objective embedding; otherwise give --block_size.")


@dataclass(frozen=True)
class Cell:
    """One training of a study.

    Args:
        name: of the cell, the same for every seed.
        seed: of the training and of the parameters that start at random.
        given: the run.
        healing: how the swap is made and healed.
        study: how it is measured.
    """

    name: str
    seed: int
    given: RunInput
    healing: HealingArguments
    study: StudyArguments

    @property
    def folder(self) -> str:
        """Relative to the folder of the study."""
        return f"{self.name.replace(' ', '_')}/seed-{self.seed}"

    @property
    def is_control(self) -> bool:
        """Whether it keeps the scheme the model has."""
        return self.given.scheme.scheme is None

    def settings(self) -> dict[str, Any]:
        """Everything that decides the figures, JSON-ready; what only decides where files go is left out."""
        parts = (self.given.model, self.given.scheme, self.given.data, self.given.lora, self.healing)
        found: dict[str, Any] = {}
        for part in parts:
            found |= dataclasses.asdict(part)
        trainer = self.given.trainer.to_dict()
        found |= {name: trainer[name] for name in _OF_THE_TRAINING}
        study = dataclasses.asdict(self.study)
        found |= {name: study[name] for name in ("objective", "lengths", "train_lengths", "eval_windows")}
        return {name: value for name, value in found.items() if value is not None}


#: Arguments of `Trainer` that are told in results and compared before a finished cell is taken as it is.
_OF_THE_TRAINING = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta2", "max_grad_norm", "bf16", "fp16", "seed",
)  # fmt: skip

_RUN = (
    ModelArguments,
    SchemeArguments,
    DataArguments,
    LoraArguments,
    RunArguments,
    HealingArguments,
    TrainingArguments,
)


def parse_study(words: Sequence[str], description: str | None = None) -> tuple[StudyArguments, str, list[Cell]]:
    """The study, its output folder and its cells, all of them checked before any is trained.

    Args:
        words: of the command line: a YAML or JSON file and flags, or flags alone.
        description: for `--help`.

    Raises:
        SettingsError: for options that cannot work, naming the cell.
    """
    study, *common = parse_arguments((StudyArguments, *_RUN), words, description)
    output_dir = str(common[-1].output_dir)
    entries = parse_structured(study.cells, "cells")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError("--cells has to be a list of mappings, each with a name and the options it differs in.")
    cells = []
    for entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SettingsError(f"A cell is named {name!r}; expected a short name of letters, digits and spaces.")
        for seed in study.seeds:
            cells.append(_cell(name, seed, entry, words, output_dir))
    names = [entry["name"] for entry in entries]
    if len({cell.folder.casefold() for cell in cells}) < len(cells):
        raise SettingsError(f"Two cells have the same name, or names of the same folder: {', '.join(names)}.")
    if sum(cell.is_control for cell in cells) != len(study.seeds):
        raise SettingsError(
            "A study has one control, which keeps its scheme and is trained as long: one cell without a 'scheme', such "
            "as {name: control}."
        )
    return study, output_dir, cells


def _cell(name: str, seed: int, entry: dict[str, Any], words: Sequence[str], output_dir: str) -> Cell:
    options = {key: value for key, value in entry.items() if key != "name"}
    shared = [key for key in options if str(key).replace("-", "_") in _OF_THE_STUDY]
    if shared:
        raise SettingsError(
            f"Cell {name!r}: {shared[0]} is the same for every cell, so that they can be compared. Give it beside "
            "cells."
        )
    flags = [f"--output_dir={output_dir}/{name.replace(' ', '_')}/seed-{seed}", f"--seed={seed}"]
    for key, value in options.items():
        if isinstance(value, list) and key == "train_lengths":
            flags += [f"--{key}", *map(str, value)]
        else:
            flags.append(f"--{key}={json.dumps(value) if isinstance(value, list | dict) else value}")
    try:
        own, model, scheme, data, lora, run, healing, trainer = parse_arguments(
            (StudyArguments, *_RUN), [*words, *flags]
        )
    except SettingsError as error:
        raise SettingsError(f"Cell {name!r}: {error}") from error
    return Cell(name, seed, RunInput(model, scheme, data, lora, run, trainer), healing, own)
