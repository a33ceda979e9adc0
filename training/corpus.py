"""Text to tokens: any dataset that `datasets` can load, split by whole documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from training.data.loading import load_named_dataset, require_column
from training.errors import SettingsError
from training.study.settings import StudySettings


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


def load_corpus(
    settings: StudySettings, tokenizer: PreTrainedTokenizerBase, train_length: int, max_length: int
) -> Corpus:
    """Loads, splits by whole documents, and tokenises.

    Args:
        settings: which text, and how it is split.
        tokenizer: to tokenise with.
        train_length: tokens of the longest window that is trained on.
        max_length: tokens of the longest window that is evaluated.

    Raises:
        SettingsError: if the dataset, its text column, or enough text in it cannot be found.
    """
    dataset, source = load_named_dataset(settings.dataset_name, settings.dataset_config_name, settings.dataset_split)
    column = settings.text_column
    require_column(dataset, column, source)
    dataset = dataset.filter(lambda text: bool(text and text.strip()), input_columns=column, desc="Dropping blanks")
    if len(dataset) == 0:
        raise SettingsError(f"The dataset {source!r} holds no document with text.")
    division = None
    if len(dataset) == 1:
        from datasets import Dataset

        texts, division = _divided(dataset[0][column], settings.validation_fraction, source)
        dataset = Dataset.from_dict({column: texts})
    order = np.random.default_rng(settings.split_seed).permutation(len(dataset))
    if division is not None:
        order = np.array([1, 0])  # held out is the end
    held_out = min(max(1, round(len(dataset) * settings.validation_fraction)), len(dataset) - 1)
    streams = {
        "validation": _tokenise(dataset, order[:held_out], column, tokenizer),
        "train": _tokenise(dataset, order[held_out:], column, tokenizer),
    }
    needed = {"train": train_length, "validation": max_length}
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
    if division is not None:
        summary["division"] = division
    return Corpus(streams["train"], streams["validation"], summary)


def unigram_cross_entropy(train: NDArray[np.int32], targets: NDArray[np.int32], vocabulary: int) -> float:
    """Loss in nats of a model that knows token frequencies and nothing else.

    Frequencies come from the training stream, add-one smoothed; the loss is taken on `targets`.
    """
    counts = np.bincount(train, minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[targets].mean())


def _divided(text: str, fraction: float, source: str) -> tuple[list[str], str]:
    """One document in two, and a sentence on where: before the last paragraph, line or word of the first share.

    Raises:
        SettingsError: if it has one word.
    """
    text = text.strip()
    end = round(len(text) * (1 - fraction))
    for separator, kind in (("\n\n", "paragraph"), ("\n", "line"), (" ", "word")):
        # Not further away than a tenth of the text: a long paragraph is cut inside.
        place = text.rfind(separator, max(0, end - len(text) // 10), end)
        if place > 0:
            where = f"from the beginning of a {kind} on"
            break
    else:
        raise SettingsError(
            f"The dataset {source!r} is one document that cannot be divided into a part to train on and one to "
            "validate on. Give several files or rows."
        )
    first, second = text[:place].rstrip(), text[place:].lstrip()
    return [first, second], (
        f"{source} is one document: its first {len(first):,} characters are trained on, and the last {len(second):,}, "
        f"{where}, are held out."
    )


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
