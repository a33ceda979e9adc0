"""What is measured on a model of a study."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_posenc import SequenceLengthError
from hf_posenc.metrics import MeasurementError, dog_test
from hf_posenc.metrics.generalization import exact_match
from hf_posenc.metrics.language_modeling import loss_by_length
from training.study.cells import Cell
from training.study.data import CellData
from training.study.embedding import Teacher

#: The most tokens of a window that count as its tail.
_TAIL = 32


def tail_tokens(train_length: int) -> int:
    """How many of the last tokens of a window are its tail."""
    return min(_TAIL, train_length // 2)


def read_before(
    cell: Cell, model: Any, data: CellData, tokenizer: PreTrainedTokenizerBase, teacher: Teacher | None
) -> dict[str, Any]:
    """What a trained model does right after it got its scheme, by length."""
    found = _figures(cell, model, data, tokenizer, teacher, whole=False)
    return {name: found[name] for name in ("lengths", "loss", "similarity", "accuracy") if name in found}


def read(
    cell: Cell, model: Any, data: CellData, tokenizer: PreTrainedTokenizerBase, teacher: Teacher | None
) -> dict[str, Any]:
    """All figures of a trained model, JSON-ready."""
    found = _figures(cell, model, data, tokenizer, teacher, whole=True)
    name = "by_length" if cell.task.synthetic is None else "exact_match"
    return {name: found, "dog": _dog(model, tokenizer)}


def _figures(
    cell: Cell,
    model: Any,
    data: CellData,
    tokenizer: PreTrainedTokenizerBase,
    teacher: Teacher | None,
    whole: bool,
) -> dict[str, Any]:
    if teacher is not None:
        lengths = cell.task.lengths
        return {
            "lengths": lengths,
            "similarity": _rounded(teacher.similarities(model, lengths, cell.task.settings.eval_windows)),
        }
    if cell.task.synthetic is not None:
        found = exact_match(
            model, tokenizer, cell.task.synthetic, cell.task.lengths, samples=cell.task.settings.test_samples
        )
        return {
            "lengths": [row.length for row in found.rows],
            "accuracy": _rounded([row.exact_match for row in found.rows]),
            "token_accuracy": _rounded([row.token_accuracy for row in found.rows]),
        }
    return _losses(cell, model, data, whole)


def _losses(cell: Cell, model: Any, data: CellData, whole: bool) -> dict[str, Any]:
    settings, causal = cell.task.settings, cell.task.causal
    assert data.windows is not None
    texts = (model, data.windows["input_ids"], data.windows["labels"], cell.task.lengths)
    tail = tail_tokens(min(settings.train_length, cell.task.lengths[0]))
    if not whole:
        found = loss_by_length(*texts, causal=causal, tail=tail)
        return {"lengths": [row.length for row in found.rows], "loss": _rounded([row.loss for row in found.rows])}
    found = loss_by_length(
        *texts,
        causal=causal,
        tail=tail,
        position_bin=max(1, settings.train_length // 4),
        sliding_window=settings.train_length if settings.train_length <= cell.task.lengths[-1] else None,
    )
    return {
        "lengths": [row.length for row in found.rows],
        "loss": _rounded([row.loss for row in found.rows]),
        "tail_loss": _rounded([row.tail_loss for row in found.rows]),
        "sliding_loss": None if found.sliding is None else _rounded([found.sliding.loss])[0],
        "position_edges": list(found.position_edges),
        "position_loss": _rounded(found.position_loss),
        "reasons": sorted({row.reason for row in found.rows if row.reason is not None}),
    }


def _dog(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
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
        "layers": [float(f"{record.value:.4g}") for record in result.of(quantity="relative_l2")],
        "probe": None if probe is None else float(f"{probe:.4g}"),
        "told_apart": result.record(subject.label, "told_apart").passed,
    }


def _rounded(values: Any) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]
