"""From the arguments that name a text to rows of tokens."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from training.arguments import DataArguments
from training.data.loading import first_rows, load_named_dataset, require_column, split_rows
from training.data.masking import RowMasking
from training.data.packing import PackedRows
from training.data.tokens import TokenStream, tokenize
from training.errors import SettingsError


def load_rows(
    data: DataArguments, tokenizer: PreTrainedTokenizerBase, causal: bool, seed: int
) -> tuple[PackedRows, PackedRows, str]:
    """Returns the rows to train on, those to validate on, and a sentence about them.

    No document is in both.

    Args:
        data: which text, and how it is packed.
        tokenizer: to tokenise with.
        causal: the next token, rather than masked ones.
        seed: of the masks of the training rows.

    Raises:
        SettingsError: for text that cannot be found, or that does not fill one row.
    """
    documents, source = _load(data, data.dataset_name, data.dataset_split, data.max_train_samples)
    if data.validation_file is not None:
        held_out, from_where = _load(data, data.validation_file, "train", data.max_eval_samples)
    elif data.validation_split is not None:
        held_out, from_where = _load(data, data.dataset_name, data.validation_split, data.max_eval_samples)
        from_where = f"{from_where} ({data.validation_split})"
    else:
        if len(documents) < 2:
            raise SettingsError(
                f"{source!r} holds {len(documents)} document, so none can be held out for validation. Cut it with "
                "--sample_by paragraph, or name other text with --validation_file."
            )
        number = min(round(len(documents) * data.validation_split_percentage / 100), len(documents) - 1)
        documents, held_out = split_rows(documents, [number], data.split_seed)
        from_where = f"{source} (held out)"
    rows = []
    for number, (part, most) in enumerate(((documents, data.max_train_samples), (held_out, data.max_eval_samples))):
        tokens = tokenize(first_rows(part, most), data.text_column, tokenizer, data.preprocessing_num_workers)
        # Masks of the validation rows are the same for every seed.
        masking = None if causal else RowMasking(tokenizer, data.mlm_probability, 0 if number else seed, stream=number)
        name = f"{'validation' if number else 'training'} part of {source!r}"
        rows.append(PackedRows(TokenStream.of_documents(tokens), data.block_size, data.packing, masking, name))
    told = [
        f"{part.stream.documents:,} documents of {name}, {len(part.stream):,} tokens, {len(part):,} rows"
        for part, name in zip(rows, (source, from_where), strict=True)
    ]
    return rows[0], rows[1], f"Training text: {told[0]}. Validation text: {told[1]}."


def _load(data: DataArguments, name: str | None, split: str, most: int | None) -> tuple[Any, str]:
    config_name = data.dataset_config_name if name == data.dataset_name else None
    first = most if data.streaming else None
    dataset, source = load_named_dataset(name, config_name, split, sample_by=data.sample_by, first=first)
    require_column(dataset, data.text_column, source)
    return dataset, source
