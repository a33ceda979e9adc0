"""Text as rows of tokens of equal length. Masks depend only on the seed, the epoch and the row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from hf_posenc.metrics.evaluation import digest
from hf_posenc.recipes import pose_positions
from training.arguments import DataArguments
from training.data.loading import first_rows, has_text_files, load_named_dataset, split_rows
from training.data.order import EpochRow, RowsByEpoch
from training.errors import SettingsError
from training.objectives import IGNORED

#: How documents share rows.
DOCUMENTS, CONCATENATE = "documents", "concatenate"


class TokenStream:
    """The tokens of all documents, one after the other.

    Args:
        tokens: `(tokens,)`; may be memory-mapped from a file.
        bounds: `(documents + 1,)`: the beginning of each document, and the end of the last one.
    """

    def __init__(self, tokens: NDArray[Any], bounds: NDArray[np.int64]) -> None:
        self.tokens, self.bounds = tokens, bounds

    @classmethod
    def of_documents(cls, documents: Any) -> TokenStream:
        """Reads the tokens of a `datasets.Dataset` with a column `input_ids`, one row for each document."""
        chunks = documents.with_format("arrow")[:].column("input_ids").chunks if len(documents) else []
        # A single chunk is a view of the Arrow file that `datasets` maps into memory.
        tokens = [chunk.flatten().to_numpy() for chunk in chunks]
        lengths = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
        bounds = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
        return cls(tokens[0] if len(tokens) == 1 else np.concatenate([np.empty(0, np.int32), *tokens]), bounds)

    def save(self, path: Path) -> None:
        """Writes `path.npy` and `path.bounds.npy` atomically, so that other processes can memory-map them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, values in ((path.name, self.tokens.astype(np.int32)), (f"{path.name}.bounds", self.bounds)):
            temporary = path.with_name(f"{name}.partial.npy")
            np.save(temporary, values)
            temporary.replace(path.with_name(f"{name}.npy"))

    @classmethod
    def open(cls, path: Path) -> TokenStream:
        """Returns a stream written by `save`, memory-mapped."""
        bounds = np.load(path.with_name(f"{path.name}.bounds.npy"))
        return cls(np.load(path.with_name(f"{path.name}.npy"), mmap_mode="r"), bounds)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.bounds) - 1

    def read(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Reads a part of the stream.

        Returns:
            Its tokens, `(stop - start,)`, and the place of each token, of the same shape: its distance from the first
            token of its document in this part (0, 1, 2, ...). It restarts at 0 where a document begins.
        """
        first = int(np.searchsorted(self.bounds, start, side="right")) - 1
        last = int(np.searchsorted(self.bounds, stop, side="left"))
        begins = np.clip(self.bounds[first:last] - start, 0, None)
        places = np.arange(stop - start) - np.repeat(begins, np.diff([*begins, stop - start]))
        return self.tokens[start:stop].astype(np.int64), places

    def digest(self) -> str:
        """Returns a digest of the tokens and of the beginnings of documents."""
        return digest(self.bounds, self.tokens.astype(np.int32))


def tokenize(documents: Any, column: str, tokenizer: PreTrainedTokenizerBase, workers: int | None = None) -> Any:
    """Returns a dataset with the column `input_ids`. Blank documents are dropped.

    Each document gets the tokenizer's special tokens and always ends with the end token (or the separator if there is
    none). Without it, a causal model could not learn where a text ends.
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        texts = [text for text in batch[column] if text is not None]
        for text in texts:
            if not isinstance(text, str):
                raise SettingsError(
                    f"The column {column!r} contains {type(text).__name__}, not text. Give another with --text_column."
                )
        texts = [text for text in texts if text.strip()]
        encoded = tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"] if texts else []
        return {"input_ids": [tokens if end is None or tokens[-1:] == [end] else [*tokens, end] for tokens in encoded]}

    if workers is not None:
        workers = max(1, min(workers, len(documents)))
    return documents.map(
        encode, batched=True, remove_columns=documents.column_names, num_proc=workers, desc="Tokenising"
    )


class RowMasking:
    """Masks a row with transformers' collator (BERT, arXiv:1810.04805, section 3.1). The masks of a row are the same on
    any number of processes and workers, and in a resumed run. They differ by epoch.

    Args:
        tokenizer: provides the mask token. Its special tokens are never targets.
        mlm_probability: share of the tokens that become targets.
        seed: seed of the masks. `stream` gives several datasets different masks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int, stream: int = 0) -> None:
        if tokenizer.mask_token is None:
            raise SettingsError(
                f"{type(tokenizer).__name__} has no mask token, so nothing can be masked. Use the tokenizer of a "
                "masked language model (--tokenizer_name), or --tokenizer_name bytes."
            )
        self.seed, self.stream = seed, stream
        self._mask = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=mlm_probability)
        self._mask.generator = torch.Generator()
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))

    def __call__(self, tokens: Tensor, epoch: int, row: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs and labels of a row, each `(length,)`."""
        return self.drawn(tokens, _seed_of(self.seed, self.stream, epoch, row))

    def drawn(self, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs and labels of a row whose masks are drawn with this seed."""
        self._mask.generator.manual_seed(seed)
        inputs, labels = self._mask.torch_mask_tokens(tokens[None].clone(), torch.isin(tokens, self._special)[None])
        return inputs[0], labels[0]


class RowSkips:
    """Draws `pose_positions` for a row. They are as reproducible as the masks of `RowMasking`.

    Args:
        target_length: number of positions.
        chunks: number of chunks per document.
        seed: seed of the draws.
    """

    def __init__(self, target_length: int, chunks: int, seed: int) -> None:
        self.target_length, self.chunks, self.seed = target_length, chunks, seed

    def __call__(self, places: Tensor, epoch: int, row: int) -> Tensor:
        """Returns the positions of a row, `(length,)`, for its `places`."""
        generator = torch.Generator().manual_seed(_seed_of(self.seed, epoch, row))
        return pose_positions(places[None], self.target_length, chunks=self.chunks, generator=generator)[0]


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(eq=False)
class PackedRows(RowsByEpoch):
    """The stream, cut every `block_size` tokens. No token is padding, and the rest at the end is dropped.

    An item has `input_ids`, `labels` and `places`, each `(block_size,)`. `places` counts from 0 in every document
    (packing "documents") or through the row ("concatenate"). A token at place 0 has no context, so it is not a target
    of a causal model. Without `masking`, the rows are for a causal model. With `skips`, an item also has the
    `positions` that the model gets instead of the places.
    """

    stream: TokenStream
    block_size: int
    packing: str
    masking: RowMasking | None
    name: str = "text"
    skips: RowSkips | None = None

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise SettingsError(
                f"The {self.name} has {len(self.stream)} tokens in {self.stream.documents} document(s), but one row "
                f"needs {self.block_size}. Use more text or a shorter --block_size."
            )

    def __len__(self) -> int:
        return len(self.stream) // self.block_size

    def __getitem__(self, index: int | EpochRow) -> dict[str, Any]:
        epoch, row = index if isinstance(index, tuple) else (0, index)
        start = row * self.block_size
        read, counted = self.stream.read(start, start + self.block_size)
        tokens = torch.from_numpy(read)
        places = torch.from_numpy(counted) if self.packing == DOCUMENTS else torch.arange(self.block_size)
        if self.masking is None:
            inputs, labels = tokens, tokens.masked_fill(places == 0, IGNORED)
        else:
            inputs, labels = self.masking(tokens, epoch, row)
        skipped = {} if self.skips is None else {"positions": self.skips(places, epoch, row)}
        return {"input_ids": inputs, "labels": labels, "places": places} | skipped


def load_rows(
    data: DataArguments, tokenizer: PreTrainedTokenizerBase, causal: bool, seed: int
) -> tuple[PackedRows, PackedRows, str]:
    """Returns the rows for training and for validation, and a sentence about them. No document is in both."""
    documents, source = _load(data, data.dataset_name, data.dataset_split, data.max_train_samples)
    if data.validation_file is not None:
        held_out, from_where = _load(data, data.validation_file, "train", data.max_eval_samples)
    elif data.validation_split is not None:
        held_out, from_where = _load(data, data.dataset_name, data.validation_split, data.max_eval_samples)
        from_where = f"{from_where} ({data.validation_split})"
    else:
        if len(documents) < 2:
            raise SettingsError(
                f"{source!r} holds {len(documents)} document, so none can be held out for validation. Split it with "
                "--sample_by paragraph, or give other text with --validation_file."
            )
        number = min(round(len(documents) * data.validation_split_percentage / 100), len(documents) - 1)
        documents, held_out = split_rows(documents, [number], data.split_seed)
        from_where = f"{source} (held out)"
    rows = []
    for number, (part, most) in enumerate(((documents, data.max_train_samples), (held_out, data.max_eval_samples))):
        tokens = tokenize(first_rows(part, most), data.text_column, tokenizer, data.preprocessing_num_workers)
        # The masks of validation rows are the same for every seed.
        masking = None if causal else RowMasking(tokenizer, data.mlm_probability, 0 if number else seed, stream=number)
        # Validation uses the positions of the rows themselves.
        skipped = None if number else data.pose_length
        skips = None if skipped is None else RowSkips(skipped, data.pose_chunks, seed)
        name = f"{'validation' if number else 'training'} part of {source!r}"
        rows.append(PackedRows(TokenStream.of_documents(tokens), data.block_size, data.packing, masking, name, skips))
    told = [
        f"{part.stream.documents:,} documents of {name}, {len(part.stream):,} tokens, {len(part):,} rows"
        for part, name in zip(rows, (source, from_where), strict=True)
    ]
    return rows[0], rows[1], f"Training text: {told[0]}. Validation text: {told[1]}."


def _load(data: DataArguments, name: str | None, split: str, most: int | None) -> tuple[Any, str]:
    config_name = data.dataset_config_name if name == data.dataset_name else None
    if data.sample_by != "document" and not has_text_files(name):
        raise SettingsError(f"--sample_by {data.sample_by} is for text files, but {name} has none. Omit it.")
    first = most if data.streaming else None
    column = data.text_column
    return load_named_dataset(name, config_name, split, column=column, sample_by=data.sample_by, first=first)
