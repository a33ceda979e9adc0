"""The text of a study: any dataset that `datasets` can load, split at document boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hf_posenc.metrics.evaluation import digest
from training.arguments import ModelArguments
from training.data.loading import first_rows, load_named_dataset, split_rows
from training.data.text import TokenStream, tokenize
from training.errors import SettingsError
from training.starting_model import BYTES, load_tokenizer
from training.study.settings import StudySettings


@dataclass
class Corpus:
    """Token streams of a dataset.

    Args:
        train: the documents for training, each with the end token at its end.
        validation: other documents in the same form.
        summary: a description of the data, JSON-ready; `digest` identifies the tokens.
    """

    train: TokenStream
    validation: TokenStream
    summary: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Writes both streams so that worker processes can memory-map them."""
        self.train.save(folder / "train")
        self.validation.save(folder / "validation")

    @staticmethod
    def open_streams(folder: Path) -> tuple[TokenStream, TokenStream]:
        """Returns the saved streams for training and validation, memory-mapped."""
        return TokenStream.open(folder / "train"), TokenStream.open(folder / "validation")


def starting_arguments(study: StudySettings) -> ModelArguments:
    """Returns the pretrained model of a study and its tokenizer. Without a model, only the tokenizer is used."""
    if study.model_name_or_path is not None:
        return ModelArguments(model_name_or_path=study.model_name_or_path, tokenizer_name=study.tokenizer_name)
    return ModelArguments(model_type="llama", tokenizer_name=study.tokenizer_name or BYTES)


def study_tokenizer(study: StudySettings) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of all models of a study. For new weights, a missing mask token is added."""
    return load_tokenizer(starting_arguments(study), causal=False)


def load_corpus(
    settings: StudySettings, tokenizer: PreTrainedTokenizerBase, train_length: int, max_length: int
) -> Corpus:
    """Loads text, splits it at document boundaries, and tokenises it. A single text file is split into paragraphs."""
    column = settings.text_column
    for sample_by in ("document", "paragraph"):
        named = settings.dataset_name, settings.dataset_config_name, settings.dataset_split
        dataset, source = load_named_dataset(*named, column=column, sample_by=sample_by)
        dataset = dataset.filter(lambda text: bool(text and text.strip()), input_columns=column, desc="Dropping blanks")
        if len(dataset) > 1:
            break
    else:
        raise SettingsError(
            f"The dataset {source!r} has {len(dataset)} document(s) with text, but validation needs another one. "
            "Give several files, rows or paragraphs."
        )
    number = min(round(len(dataset) * settings.validation_fraction), len(dataset) - 1)
    part, held_out = split_rows(dataset, [number], settings.split_seed)
    streams = []
    for name, documents, most, needed in (
        ("train", part, settings.max_train_samples, train_length),
        ("validation", held_out, settings.max_eval_samples, max_length),
    ):
        stream = TokenStream.of_documents(tokenize(first_rows(documents, most), column, tokenizer))
        if len(stream) < needed:
            raise SettingsError(
                f"The {name} part of {source!r} has {len(stream)} tokens in {stream.documents} document(s), but one "
                f"window needs {needed}. Use more text, a shorter --train_length, or another --validation_fraction."
            )
        streams.append(stream)
    train, validation = streams
    summary = {
        "source": source, "train_documents": train.documents, "validation_documents": validation.documents,
        "train_tokens": len(train), "validation_tokens": len(validation), "tokenizer": type(tokenizer).__name__,
        "vocabulary": len(tokenizer), "digest": digest(*(stream.tokens.astype(np.int32) for stream in streams)),
    }  # fmt: skip
    return Corpus(train, validation, summary)


def unigram_cross_entropy(train: NDArray[np.int32], targets: NDArray[np.int32], vocabulary: int) -> float:
    """Returns the loss in nats of a model that only knows token frequencies.

    Frequencies come from the training stream, with add-one smoothing. The loss is computed on `targets`.
    """
    counts = np.bincount(train, minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[targets].mean())
