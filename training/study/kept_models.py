"""The trained causal models that a study has kept, each measured on the same held-out text."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc.errors import UnsupportedError
from training.errors import SettingsError
from training.study.corpus import Corpus

#: What is measured on a model with `(texts, length)` token ids: one row for each figure.
Measurement = Callable[[PreTrainedModel, Tensor], pd.DataFrame]
#: Texts that are read, and how many tokens of each.
TEXTS, LENGTH = 64, 128


def kept_models(folder: Path) -> list[tuple[str, int, Path]]:
    """Label, seed and checkpoint of each causal model of a study that was run with `--save_models`."""
    # A training that has not ended leaves a folder with another ending.
    found = {path: re.fullmatch(r"causal-(.+)-seed(\d+)", path.name) for path in folder.glob("models/*")}
    return sorted((match[1], int(match[2]), path) for path, match in found.items() if match)


def held_out_texts(folder: Path) -> Tensor:
    """`(64, 128)` token ids, spread evenly over the validation text of a study."""
    stream = Corpus.open_streams(folder / "data")[1].tokens()
    starts = torch.linspace(0, len(stream) - LENGTH, TEXTS).long().tolist()
    return torch.from_numpy(np.stack([stream[start : start + LENGTH] for start in starts]).astype(np.int64))


def measure_kept_models(folders: Sequence[Path], schemes: Sequence[str], measurement: Measurement) -> pd.DataFrame:
    """The rows of every model, with its `scheme` (label) and `seed` before them.

    A model that the measurement does not apply to is left out, and named on the error stream.

    Args:
        folders: of studies with their models and their data.
        schemes: labels to measure; all if there are none.
        measurement: raises `UnsupportedError` where it does not apply.

    Raises:
        SettingsError: if no model is left.
    """
    frames = list(_measured(folders, schemes, measurement))
    if not frames:
        named = f" of {', '.join(schemes)}" if schemes else ""
        raise SettingsError(
            f"{', '.join(map(str, folders))}: no trained model{named} to measure; run the study with --save_models."
        )
    return pd.concat(frames, ignore_index=True)


def _measured(folders: Sequence[Path], schemes: Sequence[str], measurement: Measurement) -> Iterator[pd.DataFrame]:
    for folder in folders:
        for scheme, seed, path in kept_models(folder):
            if schemes and scheme not in schemes:
                continue
            try:
                frame = measurement(_loaded(path), held_out_texts(folder))
            except UnsupportedError as error:
                print(f"{scheme}, seed {seed}, is left out: {error}", file=sys.stderr)
                continue
            frame.insert(0, "scheme", scheme)
            frame.insert(1, "seed", seed)
            yield frame


def _loaded(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


def write_measurement(name: str, description: str, measurement: Measurement, words: list[str] | None) -> int:
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
    options = parser.parse_args(words)
    try:
        frame = measure_kept_models(options.folders, options.schemes, measurement)
    except SettingsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    frame.to_csv(options.output, index=False)
    models = len(frame[["scheme", "seed"]].drop_duplicates())
    print(f"Written to {options.output}: {models} models, {len(frame)} rows.")
    return 0
