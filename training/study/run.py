"""One training of a study, from its data to its result. A resumed training gives bitwise equal results."""

from __future__ import annotations

import logging
import shutil
import warnings
from typing import Any

import torch
from accelerate import PartialState
from transformers import PrinterCallback, TrainingArguments

from hf_posenc import PositionEncodingError, SequenceLengthError
from hf_posenc.checkpoint.atomic_folder import atomic_replacement
from hf_posenc.patching.place.lengths import update_tokenizer_length
from training.checkpoints import latest_complete_checkpoint
from training.data.order import RowsByEpoch
from training.errors import SettingsError, settings_errors
from training.files import write_json
from training.machine import launched_on_cpu, processor_name
from training.starting_model import add_lora
from training.study.cells import DIVERGED, FINISHED, UNSUPPORTED, Cell
from training.study.corpus import study_tokenizer
from training.study.curve import CurveCallback, OnStep, finish_trackers, recorded_curve
from training.study.models import Beginning, begin
from training.study.tasks.embedding import Teacher
from training.study.tasks.task import CellData
from training.trainer import NonFiniteLossError, SchemeTrainer

#: Rows per forward call when validating the small models.
_VALIDATION_ROWS = 256


def run_cell(cell: Cell, on_step: OnStep) -> dict[str, Any]:
    """Runs a training to the end, from its last checkpoint if there is one, and writes `result.json`.

    Returns:
        The result. Its `status` is "finished", "unsupported" if the model cannot have the scheme, or "diverged" if the
        loss became NaN or infinite. The latter two have a `reason`.
    """
    head, task, start = cell.head(), cell.task, None if cell.start is None else cell.start.result()

    def ended(status: str, reason: object) -> dict[str, Any]:
        return _conclude(cell, {**head, "status": status, "reason": str(reason)})

    if cell.start is not None and start is None:
        raise RuntimeError(f"It starts from {cell.start.name}, which has not finished.")
    if start is not None and start["status"] != FINISHED:
        reason = f"It starts from {start['scheme']!r}, which is {start['status']}: {start['reason']}"
        return ended(UNSUPPORTED, reason)
    tokenizer = study_tokenizer(cell.study)
    data = task.data(cell, tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            beginning = begin(cell, data, tokenizer)
            if not task.pretrained or cell.settings.pose_length:
                # Finds a length that the scheme cannot represent, before training takes time.
                with torch.no_grad():
                    task.try_out(beginning.model, data)
        except (ValueError, SequenceLengthError) as error:
            return ended(UNSUPPORTED, error)
    head["notes"] = sorted({str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)})
    if task.has_teacher:
        data.teacher = Teacher(beginning.teacher, data.validation)
    if cell.goes_on:
        head["before"] = task.read(cell, beginning.model, data, whole=False)
    if beginning.swap is not None:
        # Its options may come from the old scheme.
        head |= {"config": beginning.swap.new.to_dict(), "swap": beginning.swap.to_dict()}
    try:
        trainer = _trainer(cell, beginning, data, on_step)
        trained_parameters = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
        head |= {"parameters": trained_parameters, "threads": torch.get_num_threads()}
        head |= {"processes": trainer.args.world_size, "processor": processor_name()}
        try:
            training = _train(cell, trainer)
        finally:
            finish_trackers(trainer.args)
    except NonFiniteLossError as error:
        return ended(DIVERGED, error)
    except PositionEncodingError as error:
        return ended(UNSUPPORTED, error)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if cell.asked.swap.lora:
        trained = trained.merge_and_unload()
    result = {**head, "status": FINISHED, **training, "model": None}
    dog = task.dogs(cell, trained, tokenizer)
    figures = task.read(cell, trained, data, whole=not cell.study._for_rates)
    result |= {task.figures: figures, "dog": dog}
    if cell.study.save_models or cell.is_start:
        result["model"] = str(cell.model_folder.relative_to(cell.study_folder))
        if trainer.is_world_process_zero():
            _save(cell, trained, task.processor(cell, tokenizer))
    return _conclude(cell, result)


def _train(cell: Cell, trainer: SchemeTrainer) -> dict[str, Any]:
    if not cell.settings.max_steps:
        trainer.evaluate()
        return recorded_curve(trainer.state)
    checkpoint = latest_complete_checkpoint(cell.folder, trainer.args.world_size)
    # A resumed run has its first point from the checkpoint.
    trainer.args.eval_on_start = cell.goes_on and checkpoint is None
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return recorded_curve(trainer.state)


def _trainer(cell: Cell, beginning: Beginning, data: CellData, on_step: OnStep) -> SchemeTrainer:
    # At every checkpoint, accelerate warns that tied weights are stored once.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    swap, curve = cell.asked.swap, CurveCallback(cell.settings.eval_every, on_step)
    options: dict[str, Any] = {
        "model": add_lora(beginning.model, swap, cell.task.causal) if swap.lora else beginning.model,
        "args": _arguments(cell, data), "train_dataset": data.train, "eval_dataset": data.validation,
        "data_collator": data.collate, "callbacks": [curve, *swap.callbacks()],
    }  # fmt: skip
    trainer = cell.task.trainer(options, swap, beginning.teacher, data)
    trainer.remove_callback(PrinterCallback)
    curve.trainer = trainer
    return trainer


def _arguments(cell: Cell, data: CellData) -> TrainingArguments:
    settings, whole = cell.settings, cell.task.has_teacher
    given = {
        "use_cpu": launched_on_cpu(),
        "lr_scheduler_type": "cosine",
        "adam_beta2": 0.98,
        # Windows are already in order. Packed rows and pictures are not.
        "train_sampling_strategy": "random" if isinstance(data.train, RowsByEpoch) else "sequential",
        "per_device_eval_batch_size": settings.batch_size if cell.task.pretrained else _VALIDATION_ROWS,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "run_name": cell.name,
        "project": cell.study.name,
    } | settings.trainer
    with settings_errors(f"trainer {settings.trainer}", TypeError, ValueError, ImportError):
        arguments = TrainingArguments(
            output_dir=str(cell.folder), max_steps=max(1, settings.max_steps), learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup_steps, weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm, seed=cell.seed, remove_unused_columns=False, label_names=["labels"],
            logging_strategy="no", save_steps=settings.checkpoint_every, save_total_limit=1,
            report_to=cell.study.report_to or "none", disable_tqdm=True, **given,
        )  # fmt: skip
    # A training item of the embedding task is a whole batch, which cannot be split.
    items = 1 if whole else settings.batch_size
    sharing = arguments.world_size * (1 if whole else arguments.gradient_accumulation_steps)
    if items % sharing:
        raise SettingsError(
            f"A batch of {items} item(s) cannot be split over {arguments.world_size} processes x "
            f"{arguments.gradient_accumulation_steps} accumulated batches. Use a multiple as --batch_size. The "
            "task 'embedding' needs one process."
        )
    arguments.per_device_train_batch_size = items // sharing
    return arguments


def _save(cell: Cell, model: Any, processor: Any) -> None:
    shutil.rmtree(cell.model_folder, ignore_errors=True)
    update_tokenizer_length(processor, model)
    with atomic_replacement(cell.model_folder) as draft:
        model.save_pretrained(draft)
        processor.save_pretrained(draft)


def _conclude(cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    state = PartialState()
    if state.is_main_process:
        write_json(cell.folder / "result.json", result)
        for pattern in ("checkpoint-*", "training_args.bin", cell.step_file.name):
            for path in cell.folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    state.wait_for_everyone()
    return result
