"""What is measured on a model of a study."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_posenc import SequenceLengthError, UnsupportedError
from hf_posenc.metrics import MeasurementError, dog_test
from hf_posenc.metrics.generalization import exact_match
from hf_posenc.metrics.images.resolution import accuracy_by_resolution
from hf_posenc.metrics.images.sensitivity import SIDE, picture_dog_test
from hf_posenc.metrics.language_modeling import loss_by_length
from hf_posenc.report import Result
from training.study.cells import Cell
from training.study.data import CellData
from training.study.embedding import Teacher

#: The most tokens of a window that count as its tail.
_TAIL = 32


def tail_tokens(train_length: int) -> int:
    """How many of the last tokens of a window are its tail."""
    return min(_TAIL, train_length // 2)


def read_lengths(
    cell: Cell,
    model: Any,
    data: CellData,
    tokenizer: PreTrainedTokenizerBase,
    teacher: Teacher | None,
    whole: bool = True,
) -> dict[str, Any]:
    """The figures of a model by length, JSON-ready.

    Args:
        cell: which one.
        model: what is read.
        data: of the cell.
        tokenizer: of the model.
        teacher: what embeddings are compared with.
        whole: everything, rather than the one figure that models are compared by.
    """
    task, settings, lengths = cell.task, cell.task.settings, cell.task.lengths
    if teacher is not None:
        similarities = teacher.similarities(model, lengths, settings.eval_windows)
        return {"lengths": lengths, "similarity": _rounded(similarities)}
    if task.synthetic is not None:
        samples, seed = settings.test_samples, cell.question_seed
        matches = exact_match(model, tokenizer, task.synthetic, lengths, samples=samples, seed=seed).rows
        tokens = {"token_accuracy": _rounded([row.token_accuracy for row in matches])} if whole else {}
        return {"lengths": lengths, "accuracy": _rounded([row.exact_match for row in matches])} | tokens
    if data.pictures is not None:
        rows = accuracy_by_resolution(model, data.pictures, lengths)
        return {
            "lengths": lengths,
            "accuracy": _rounded([row.accuracy for row in rows]),
            "loss": _rounded([row.loss for row in rows]),
            "reasons": sorted({f"{row.resolution} pixels: {row.reason}" for row in rows if row.reason}),
        }
    assert data.windows is not None
    found = loss_by_length(
        model,
        data.windows["input_ids"],
        data.windows["labels"],
        lengths,
        causal=task.causal,
        tail=tail_tokens(min(settings.train_length, lengths[0])),
        position_bin=max(1, settings.train_length // 4) if whole else None,
        sliding_window=settings.train_length if whole and settings.train_length <= lengths[-1] else None,
    )
    losses = {"lengths": lengths, "loss": _rounded([row.loss for row in found.rows])}
    if not whole:
        return losses
    return losses | {
        "tail_loss": _rounded([row.tail_loss for row in found.rows]),
        "window_tail_loss": [_rounded(row.window_tail_losses) for row in found.rows],
        "sliding_loss": None if found.sliding is None else _rounded([found.sliding.loss])[0],
        "position_edges": list(found.position_edges),
        "position_loss": _rounded(found.position_loss),
        "reasons": sorted({row.reason for row in found.rows if row.reason is not None}),
    }


def read_dogs(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Distance between the two dogs of the dog test, embeddings first, then layer by layer."""
    try:
        result = dog_test(model, tokenizer)
    except (MeasurementError, SequenceLengthError) as error:
        return {"error": str(error)}
    (subject,) = result.subjects
    if subject.error is not None:
        return {"error": subject.error}
    probe = result.value(subject.label, "probe")
    return {
        "layers": _layers(result),
        "probe": None if probe is None else float(f"{probe:.4g}"),
        "told_apart": result.record(subject.label, "told_apart").passed,
    }


def read_picture_dogs(cell: Cell, model: Any) -> dict[str, Any]:
    """Distance between the two dogs of one picture, at the trained resolution, layer by layer."""
    grid = cell.settings.train_resolution // cell.settings.patch_size
    try:
        # In two corners, so that small grids have room for both.
        result = picture_dog_test(model, grid=grid, first=(0, 0), second=(0, grid - SIDE))
    except (MeasurementError, UnsupportedError) as error:
        return {"error": str(error)}
    (subject,) = result.subjects
    if subject.error is not None:
        return {"error": subject.error}
    return {"layers": _layers(result), "told_apart": result.record(subject.label, "told_apart").passed}


def _layers(result: Result) -> list[float]:
    return [float(f"{record.value:.4g}") for record in result.of(quantity="relative_l2")]


def _rounded(values: Any) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]
