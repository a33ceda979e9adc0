"""What a cell is trained on, and what it is read with; the same for every scheme."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, StackDataset, default_collate
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from hf_posenc.errors import UsageError
from hf_posenc.metrics.generalization import EncoderDecoderCollator, SyntheticExamples, held_out_examples
from hf_posenc.metrics.generalization.examples import encode_example, end_token, padding_token, tokens_of_row
from hf_posenc.metrics.generalization.task import SyntheticTask
from hf_posenc.metrics.images.pictures import Normalization, Pictures, load_pictures
from training.data.blocking import Batches
from training.data.masking import RowMasking
from training.data.packing import CONCATENATE, PackedRows
from training.data.pictures import Augmentation, PictureRows, first_pictures, split_pictures
from training.errors import SettingsError
from training.objectives import IGNORED
from training.study.cells import IMAGES, Cell
from training.study.corpus import Corpus
from training.study.embedding import TeacherBatches, Texts
from training.study.settings import StudySettings, TrainingSettings

#: Of the pictures of the task images.
_CHANNELS = 3

Collate = Callable[[list[Any]], dict[str, Tensor]]


@dataclass
class CellData:
    """The data of one training.

    Args:
        train: the training set, also of a cell that is only read: a start may be fitted on it.
        collate: makes a batch of its items, and of those of `validation`.
        validation: for the points of the curve: text of the trained length, or examples of the trained lengths that
            training does not contain.
        windows: text to evaluate by length, `input_ids` and `labels`, `(windows, longest length)` each; `None` for a
            synthetic task and for embeddings.
        positions: of the longest sequence that is evaluated.
        pictures: to evaluate by resolution; `None` for other tasks than images.
    """

    train: Any
    collate: Collate
    validation: Any
    windows: dict[str, Tensor] | None
    positions: int
    pictures: Pictures | None = None


def cell_data(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    """The data of a cell.

    Raises:
        SettingsError: for text that does not fill one row.
    """
    if cell.task.synthetic is not None:
        return _synthetic(cell, cell.task.synthetic, tokenizer)
    if cell.task.name == IMAGES:
        return _pictures(cell)
    if cell.task.kind == "embedding":
        return _embedding(cell, tokenizer)
    return _packed(cell, tokenizer) if cell.task.pretrained else _windows(cell, tokenizer)


# Text for new weights


class TrainingWindows(Dataset[dict[str, Any]]):
    """Windows of `train_length` tokens in a fixed random order, repeated (reshuffled) until `max_steps` are filled.

    Item `i` holds the tokens of a window, `(train_length,)`, and its place `i`, so that what happens to a window can
    depend on its place alone.
    """

    def __init__(self, stream: NDArray[np.int32], settings: TrainingSettings, seed: int) -> None:
        self.stream = stream
        self.length = settings.train_length
        windows = len(stream) // self.length
        wanted = max(settings.max_steps, 1) * settings.batch_size
        generator = np.random.default_rng([seed, 1])
        epochs = [generator.permutation(windows) for _ in range(-(-wanted // windows))]
        self.order = np.concatenate(epochs)[:wanted]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self.order[index]) * self.length
        window = torch.from_numpy(self.stream[start : start + self.length].astype(np.int64))
        return {"input_ids": window, "place": index}


class WindowCollator:
    """Makes batches of windows; those of a masked task are masked by the seed and their place, and nothing else.

    The masks are therefore the same for every scheme, on any number of processes, and after a run was resumed.

    Args:
        tokenizer: whose mask token is shown.
        mlm_probability: share of the tokens that become targets; `None` for a causal task.
        seed: of the masks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float | None, seed: int) -> None:
        self.seed, self.mask = seed, None
        if mlm_probability is not None:
            self.mask = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=mlm_probability)
            self.mask.generator = torch.Generator()

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, each `(batch, length)`; rows that have labels stay as they are."""
        if "labels" in items[0]:
            return default_collate(items)
        if self.mask is None:
            windows = torch.stack([item["input_ids"] for item in items])
            return {"input_ids": windows, "labels": windows}
        rows = []
        for item in items:
            self.mask.generator.manual_seed(self.seed * 1_000_003 + item["place"] + 1)
            rows.append(self.mask([item["input_ids"]]))
        return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels")}


def validation_windows(stream: NDArray[np.int32], settings: TrainingSettings) -> Tensor:
    """`(windows, longest length)` int64: up to `eval_windows` windows, spread evenly over the stream."""
    length = settings.lengths[-1]
    count = min(settings.eval_windows, len(stream) // length)
    starts = np.linspace(0, len(stream) - length, count).astype(np.int64)
    return torch.from_numpy(np.stack([stream[start : start + length] for start in starts]).astype(np.int64))


def validation_batch(
    windows: Tensor, tokenizer: PreTrainedTokenizerBase, causal: bool, mlm_probability: float
) -> dict[str, Tensor]:
    """Inputs and targets for evaluation, each `(windows, longest length)`; the same for every seed.

    Masked: every target is shown as the mask token (no random and no unchanged tokens, as there are in training), so
    that a model that knows nothing but frequencies scores the unigram cross-entropy. Causal: the first token of a
    window has no context and is no target.
    """
    if causal:
        labels = windows.clone()
        labels[:, 0] = IGNORED
        return {"input_ids": windows, "labels": labels}
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm=True, mlm_probability=mlm_probability, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    collate.generator = torch.Generator().manual_seed(0)
    return dict(collate(list(windows)))


def _windows(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    settings, task, causal = cell.settings, cell.task.settings, cell.task.causal
    train, validation = Corpus.open_streams(cell.study_folder / "data")
    # Read as the task says, also by a scheme that is trained longer or on longer windows: one table compares them.
    windows = validation_batch(validation_windows(validation.tokens(), task), tokenizer, causal, task.mlm_probability)
    length = min(task.train_length, task.lengths[-1])
    return CellData(
        train=TrainingWindows(train.tokens(), settings, cell.seed),
        collate=WindowCollator(tokenizer, None if causal else settings.mlm_probability, cell.seed),
        validation=_rows({name: tokens[:, -length:].clone() for name, tokens in windows.items()}),
        windows=windows,
        positions=max(task.lengths[-1], settings.train_length),
    )


def _rows(tensors: dict[str, Any]) -> Any:
    """The rows of tensors that share their first dimension."""
    return StackDataset(**tensors)


# Text for pretrained models


def _packed(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    """Text in the rows of `run_clm.py` and `run_mlm.py`."""
    settings, task = cell.settings, cell.task.settings
    streams = Corpus.open_streams(cell.study_folder / "data")

    def rows(part: int, length: int) -> PackedRows:
        # Masks of the validation rows are the same for every seed.
        seed = 0 if part else cell.seed
        masking = None if cell.task.causal else RowMasking(tokenizer, settings.mlm_probability, seed, stream=part)
        return PackedRows(streams[part], length, CONCATENATE, masking, ("training", "validation")[part] + " text")

    longest = rows(1, task.lengths[-1])
    count = min(task.eval_windows, len(longest))
    chosen = [longest[index * len(longest) // count] for index in range(count)]
    return CellData(
        train=rows(0, settings.train_length),
        collate=Batches(None),
        validation=rows(1, task.train_length),
        windows={name: torch.stack([row[name] for row in chosen]) for name in ("input_ids", "labels")},
        positions=max(task.lengths[-1], settings.train_length),
    )


def _embedding(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
    settings, lengths = cell.settings, cell.train_lengths
    train, validation = (Texts(stream, tokenizer) for stream in Corpus.open_streams(cell.study_folder / "data"))
    tokens = settings.batch_size * settings.train_length
    return CellData(
        train=TeacherBatches(train, lengths, tokens, settings.max_steps, cell.seed),
        collate=itemgetter(0),
        validation=validation,
        windows=None,
        positions=max(lengths),
    )


# Images


def study_pictures(study: StudySettings) -> tuple[Pictures, Pictures, Pictures]:
    """The pictures to train on, those of the curves, and those that the accuracy by resolution is measured on.

    Raises:
        SettingsError: if they cannot be loaded, or are too few.
    """
    try:
        pictures = load_pictures(study.dataset_name, study.dataset_config_name, study.dataset_split)
    except UsageError as error:
        raise SettingsError(f"--dataset_name: {error}") from error
    shares = [study.validation_fraction, study.test_fraction]
    train, validation, test = split_pictures(pictures, shares, study.split_seed)
    most = study.max_train_samples, study.max_eval_samples
    return first_pictures(train, most[0]), first_pictures(validation, most[1]), first_pictures(test, most[1])


def pictures_summary(study: StudySettings) -> dict[str, Any]:
    """What the pictures of a study are, JSON-ready; `digest` identifies them."""
    train, validation, test = parts = study_pictures(study)
    digests = [PictureRows(part, 8, 3, Normalization()).digest() for part in parts]
    return {
        "source": train.source,
        "classes": len(train.classes),
        "train_pictures": len(train),
        "validation_pictures": len(validation),
        "test_pictures": len(test),
        "digest": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
    }


def _pictures(cell: Cell) -> CellData:
    train, validation, test = study_pictures(cell.study)
    resolution, task_resolution = cell.settings.train_resolution, cell.task.settings.train_resolution
    return CellData(
        train=PictureRows(
            train, resolution, _CHANNELS, Normalization(), Augmentation(cell.settings.random_crop, seed=cell.seed)
        ),
        collate=lambda rows: default_collate(rows) | {"interpolate_pos_encoding": True},
        validation=PictureRows(validation, task_resolution, _CHANNELS, Normalization()),
        windows=None,
        positions=(max(cell.task.lengths) // cell.task.settings.patch_size) ** 2,
        pictures=test,
    )


# Synthetic tasks


def _synthetic(cell: Cell, task: SyntheticTask, tokenizer: PreTrainedTokenizerBase) -> CellData:
    settings, lengths = cell.settings, cell.task.train_lengths(cell.task.settings)
    longest = max(task.character_count(length) for length in {*lengths, *cell.train_lengths, *cell.task.lengths})
    size = max(settings.max_steps, 1) * settings.batch_size
    padding = padding_token(tokenizer)
    # A few examples of every trained length.
    examples = [one for length in lengths for one in held_out_examples(task, length, samples=8, seed=0)]
    encoded = [encode_example(tokenizer, one) for one in examples]
    rows, labels = ([torch.tensor(one[part]) for one in encoded] for part in (0, 1))
    return CellData(
        train=SyntheticExamples(task, cell.train_lengths, seed=cell.seed, tokenizer=tokenizer, size=size),
        collate=EncoderDecoderCollator(end_token(tokenizer), padding) if cell.task.encoder_decoder else default_collate,
        validation=_rows(
            {
                "input_ids": pad_sequence(rows, batch_first=True, padding_value=padding),
                "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
                "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            }
        ),
        windows=None,
        positions=tokens_of_row(tokenizer, longest),
    )
