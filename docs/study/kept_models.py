"""The trained causal models that a study has kept, each measured on the same held-out text."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc.errors import UnsupportedError
from training.errors import SettingsError
from training.files import read_json
from training.study.corpus import Corpus

#: What is measured on a model with `(texts, length)` token ids: one row for each figure.
Measurement = Callable[[PreTrainedModel, Tensor], pd.DataFrame]
#: Texts that are read; each has the trained length.
TEXTS = 64


@dataclass(frozen=True)
class KeptModel:
    """The checkpoint of a finished training.

    Args:
        scheme: its label.
        seed: its seed.
        folder: of the study.
    """

    scheme: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """The name of its folders."""
        return f"causal-{self.scheme}-seed{self.seed}"

    def load(self) -> PreTrainedModel:
        """The model in float32."""
        path = self.folder / "models" / self.name
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model

    def texts(self) -> Tensor:
        """`(64, trained length)` token ids, spread evenly over the validation text of the study."""
        length = int(read_json(self.folder / "trainings" / self.name / "settings.json")["train_length"])
        stream = Corpus.open_streams(self.folder / "data")[1].tokens
        starts = torch.linspace(0, len(stream) - length, TEXTS).long().tolist()
        return torch.from_numpy(np.stack([stream[start : start + length] for start in starts]).astype(np.int64))


def kept_models(folders: Sequence[Path], schemes: Sequence[str], seeds: Sequence[int]) -> list[KeptModel]:
    """The causal models of studies that were run with `--save_models`.

    Args:
        folders: of the studies.
        schemes: labels; all if there are none.
        seeds: their seeds; all if there are none.

    Raises:
        SettingsError: if a folder has none, two of them have the same one, or there is none of a label or a seed.
    """
    models: dict[tuple[str, int], KeptModel] = {}
    for folder in folders:
        # A training that has not ended leaves a folder with another ending.
        matches = [re.fullmatch(r"causal-(.+)-seed(\d+)", path.name) for path in folder.glob("models/*")]
        in_folder = [KeptModel(match[1], int(match[2]), folder) for match in matches if match]
        if not in_folder:
            raise SettingsError(f"{folder} has no trained causal model; run the study with --save_models.")
        for model in in_folder:
            other = models.setdefault((model.scheme, model.seed), model)
            if other is not model:
                raise SettingsError(f"{model.name} is in {other.folder} and in {folder}; leave one of them out.")
    for name, wanted, known in (
        ("--schemes", schemes, {scheme for scheme, _ in models}),
        ("--seeds", seeds, {seed for _, seed in models}),
    ):
        unknown = [str(value) for value in wanted if value not in known]
        if unknown:
            raise SettingsError(f"{name} {unknown[0]}: there are models of {', '.join(map(str, sorted(known)))}.")
    return [
        model
        for (scheme, seed), model in sorted(models.items())
        if (not schemes or scheme in schemes) and (not seeds or seed in seeds)
    ]


def measure_kept_models(models: Sequence[KeptModel], measurement: Measurement) -> pd.DataFrame:
    """The rows of every model, with its `scheme` (label) and `seed` before them.

    A model that the measurement does not apply to is left out, and named on the error stream.

    Raises:
        SettingsError: if no model is left.
    """
    frames = []
    for model in models:
        try:
            frame = measurement(model.load(), model.texts())
        except UnsupportedError as error:
            print(f"{model.name} is left out: {error}", file=sys.stderr)
            continue
        frame.insert(0, "scheme", model.scheme)
        frame.insert(1, "seed", model.seed)
        frames.append(frame)
    if not frames:
        raise SettingsError("The measurement applies to none of these models; the reasons stand above.")
    return pd.concat(frames, ignore_index=True)


def write_measurement(name: str, description: str, measurement: Measurement, words: list[str] | None = None) -> int:
    """The command line of a measurement. Returns the exit status.

    Args:
        name: of the program, for messages.
        description: for `--help`.
        measurement: what is measured on each model.
        words: of the command line; by default those of the process.
    """
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a study with models/ and data/")
    parser.add_argument("--output", type=Path, required=True, help="a CSV file")
    parser.add_argument("--schemes", nargs="+", default=[], metavar="LABEL", help="labels to measure (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="SEED", help="seeds (default: all)")
    options = parser.parse_args(words)
    try:
        models = kept_models(options.folders, options.schemes, options.seeds)
        if not options.output.parent.is_dir():
            raise SettingsError(f"The folder of --output {options.output} does not exist.")
        frame = measure_kept_models(models, measurement)
    except (SettingsError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    frame.to_csv(options.output, index=False)
    measured = len(frame[["scheme", "seed"]].drop_duplicates())
    print(f"Written to {options.output}: {measured} models, {len(frame)} rows.")
    return 0
