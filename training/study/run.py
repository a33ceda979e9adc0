"""One training of a study, from its data to its result; resumable to the bit."""

from __future__ import annotations

import logging
import shutil
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainingArguments

from hf_posenc import SequenceLengthError
from hf_posenc.metrics import MeasurementError, dog_test
from hf_posenc.metrics.generalization import exact_match
from hf_posenc.metrics.language_modeling import loss_by_length
from training.checkpoints import latest_complete_checkpoint
from training.corpus import load_tokenizer
from training.files import write_json
from training.launched import launched_on_cpu
from training.study.cells import DIVERGED, FINISHED, UNSUPPORTED, Cell
from training.study.curve import CurveCallback, OnStep, recorded_curve, recorded_seconds
from training.study.data import CellData, cell_data
from training.study.models import build_model, trainable_parameters
from training.study.rows import Rows
from training.trainer import NonFiniteLossError, SchemeTrainer

#: The most tokens of a window that count as its tail.
TAIL = 32
#: Rows per forward call of a validation.
_VALIDATION_ROWS = 256


def tail_tokens(train_length: int) -> int:
    """How many of the last tokens of a window are its tail."""
    return min(TAIL, train_length // 2)


def run_cell(cell: Cell, on_step: OnStep) -> dict[str, Any]:
    """Runs a training to its end, from its last checkpoint if there is one, and writes `result.json`.

    Returns:
        The result: `status` is "finished"; "unsupported", if the model cannot take the scheme; or "diverged", if the
        loss stopped being a number. The latter two come with a `reason`.
    """
    tokenizer = load_tokenizer(cell.study.tokenizer_name)
    head = cell.head()
    start = _start(cell)
    if start is not None and start["status"] != FINISHED:
        reason = f"It starts from {start['scheme']!r}, which is {start['status']}: {start['reason']}"
        return _conclude(cell, {**head, "status": UNSUPPORTED, "reason": reason})
    data = cell_data(cell, tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = build_model(cell, tokenizer, data.positions)
            _check_length(model, data.positions)
        except (ValueError, SequenceLengthError) as error:
            return _conclude(cell, {**head, "status": UNSUPPORTED, "reason": str(error)})
    notes = sorted({str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)})
    head |= {"notes": notes, "parameters": trainable_parameters(model), "threads": torch.get_num_threads()}
    trainer = _trainer(cell, model, data, tokenizer, on_step)
    head["processes"] = trainer.args.world_size
    try:
        if data.train is not None:
            checkpoint = latest_complete_checkpoint(cell.folder, trainer.args.world_size)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            training = {"curve": recorded_curve(trainer.state), **recorded_seconds(trainer.state)}
        else:
            training = {"curve": _untrained_point(trainer), "seconds": 0.0, "cpu_seconds": 0.0}
    except NonFiniteLossError as error:
        return _conclude(cell, {**head, "status": DIVERGED, "reason": str(error)})
    trained = trainer.accelerator.unwrap_model(trainer.model)
    result = {**head, "status": FINISHED, **training, **_evaluation(cell, trained, data, tokenizer), "model": None}
    if cell.keeps_model:
        result["model"] = str(cell.model_folder.relative_to(cell.study.output_dir))
        if trainer.is_world_process_zero():
            _save(cell, trained, tokenizer)
    return _conclude(cell, result)


def _start(cell: Cell) -> dict[str, Any] | None:
    if cell.start is None:
        return None
    result = cell.start.result()
    if result is None:
        raise RuntimeError(f"It starts from {cell.start.name}, which has not ended.")
    return result


@torch.no_grad()
def _check_length(model: Any, length: int) -> None:
    """Reads a sequence of the longest evaluated length, before any time goes into training.

    Raises:
        SequenceLengthError: if the scheme cannot represent that length.
    """
    model(input_ids=torch.zeros(1, length, dtype=torch.int64, device=model.device))


def _trainer(cell: Cell, model: Any, data: CellData, tokenizer: Any, on_step: OnStep) -> SchemeTrainer:
    settings = cell.settings
    # accelerate warns at every checkpoint that tied weights are stored once.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    arguments = TrainingArguments(
        output_dir=str(cell.folder),
        use_cpu=launched_on_cpu(),
        max_steps=max(1, settings.max_steps),
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta2=0.98,
        max_grad_norm=settings.max_grad_norm,
        seed=cell.seed,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        label_names=["labels"],
        logging_strategy="no",
        save_steps=settings.checkpoint_every,
        save_total_limit=1,
        per_device_eval_batch_size=_VALIDATION_ROWS,
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    if settings.batch_size % arguments.world_size:
        raise ValueError(
            f"A batch of {settings.batch_size} sequences cannot be dealt out to {arguments.world_size} processes; "
            "take a --batch_size that is a multiple."
        )
    arguments.per_device_train_batch_size = settings.batch_size // arguments.world_size
    curve = CurveCallback(settings.eval_every, on_step)
    trainer = SchemeTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=Rows(data.validation),
        data_collator=data.collate,
        callbacks=[curve],
        causal=cell.task.causal,
    )
    trainer.remove_callback(PrinterCallback)
    curve.trainer = trainer
    return trainer


def _untrained_point(trainer: SchemeTrainer) -> dict[str, list[float]]:
    loss = trainer.evaluate()["eval_loss"]
    return {"step": [0], "train_loss": [], "validation_loss": [round(loss, 4)]}


def _evaluation(cell: Cell, model: Any, data: CellData, tokenizer: Any) -> dict[str, Any]:
    if data.windows is not None:
        figures = {"by_length": _by_length(cell, model, data.windows)}
    else:
        assert cell.task.synthetic is not None
        found = exact_match(
            model, tokenizer, cell.task.synthetic, cell.task.lengths, samples=cell.task.settings.test_samples
        )
        figures = {"exact_match": _by_problem_length(found)}
    return figures | {"dog": _dog(model, tokenizer)}


def _by_length(cell: Cell, model: Any, windows: dict[str, Tensor]) -> dict[str, Any]:
    settings = cell.task.settings
    found = loss_by_length(
        model,
        windows["input_ids"],
        windows["labels"],
        cell.task.lengths,
        causal=cell.task.causal,
        tail=tail_tokens(settings.train_length),
        position_bin=max(1, settings.train_length // 4),
        sliding_window=settings.train_length,
    )
    return {
        "lengths": [row.length for row in found.rows],
        "loss": [_rounded(row.loss) for row in found.rows],
        "tail_loss": [_rounded(row.tail_loss) for row in found.rows],
        "sliding_loss": None if found.sliding is None else _rounded(found.sliding.loss),
        "position_edges": list(found.position_edges),
        "position_loss": [_rounded(loss) for loss in found.position_loss],
    }


def _by_problem_length(found: Any) -> dict[str, Any]:
    return {
        "lengths": [row.length for row in found.rows],
        "accuracy": [_rounded(row.exact_match) for row in found.rows],
        "token_accuracy": [_rounded(row.token_accuracy) for row in found.rows],
    }


def _dog(model: Any, tokenizer: Any) -> dict[str, Any]:
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


def _save(cell: Cell, model: Any, tokenizer: Any) -> None:
    partial = cell.model_folder.with_name(f"{cell.model_folder.name}.partial")
    for folder in (partial, cell.model_folder):
        shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(cell.model_folder)


def _conclude(cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    from accelerate import PartialState

    state = PartialState()
    if state.is_main_process:
        write_json(cell.folder / "result.json", result)
        for pattern in ("checkpoint-*", "training_args.bin"):
            for path in cell.folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    state.wait_for_everyone()
    return result


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
