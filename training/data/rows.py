"""From the arguments that name a text to rows of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from training.arguments import DataArguments
from training.data.loading import load_named_dataset, require_column
from training.data.masking import RowMasking
from training.data.packing import PackedRows
from training.data.tokens import TokenStream, tokenize
from training.errors import SettingsError


def load_rows(
    data: DataArguments, tokenizer: PreTrainedTokenizerBase, causal: bool, seed: int
) -> tuple[PackedRows, PackedRows, str]:
    """The rows to train on, those to validate on, and a sentence about them.

    No document is in both.

    Args:
        data: which text, and how it is packed.
        tokenizer: to tokenise with.
        causal: the next token, rather than masked ones.
        seed: of the masks of the training rows.

    Raises:
        SettingsError: for text that cannot be found, or that does not fill one row.
    """
    first = data.max_train_samples if data.streaming else None
    documents, source = load_named_dataset(
        data.dataset_name, data.dataset_config_name, data.dataset_split, sample_by=data.sample_by, first=first
    )
    require_column(documents, data.text_column, source)
    held_out, held_out_source = _held_out(data)
    if held_out is None:
        documents, held_out = _split(documents, data, source)
    streams = []
    for part, most in ((documents, data.max_train_samples), (held_out, data.max_eval_samples)):
        part = part if most is None else part.select(range(min(most, len(part))))
        streams.append(
            TokenStream.of_documents(tokenize(part, data.text_column, tokenizer, data.preprocessing_num_workers))
        )
    rows = [
        PackedRows(
            stream,
            data.block_size,
            data.packing,
            # Masks of the validation rows are the same for every seed.
            None if causal else RowMasking(tokenizer, data.mlm_probability, 0 if number else seed, stream=number),
            f"{'validation' if number else 'training'} part of {source!r}",
        )
        for number, stream in enumerate(streams)
    ]
    sentence = (
        f"Text: {source}, {streams[0].documents:,} documents to train on ({len(streams[0]):,} tokens, "
        f"{len(rows[0]):,} rows), {streams[1].documents:,} {held_out_source} ({len(streams[1]):,} tokens, "
        f"{len(rows[1]):,} rows)."
    )
    return rows[0], rows[1], sentence


def _held_out(data: DataArguments) -> tuple[Any, str]:
    if data.validation_file is not None:
        found, source = load_named_dataset(data.validation_file, sample_by=data.sample_by)
    elif data.validation_split is not None:
        found, source = load_named_dataset(
            data.dataset_name,
            data.dataset_config_name,
            data.validation_split,
            sample_by=data.sample_by,
            first=data.max_eval_samples if data.streaming else None,
        )
        source = f"{source} ({data.validation_split})"
    else:
        return None, "held out"
    require_column(found, data.text_column, source)
    return found, f"of {source}"


def _split(documents: Any, data: DataArguments, source: str) -> tuple[Any, Any]:
    if len(documents) < 2:
        raise SettingsError(
            f"{source!r} holds {len(documents)} document, so none can be held out for validation. Cut it with "
            "--sample_by paragraph, or name other text with --validation_file."
        )
    order = np.random.default_rng(data.split_seed).permutation(len(documents))
    share = round(len(documents) * data.validation_split_percentage / 100)
    held_out = min(max(1, share), len(documents) - 1)
    return documents.select(order[held_out:]), documents.select(order[:held_out])
