"""One training of a study, from its data to its result; resumable to the bit."""

from __future__ import annotations

import logging
import shutil
import warnings
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainingArguments, ViTImageProcessorPil

from hf_posenc import PositionEncodingError, SequenceLengthError
from hf_posenc.metrics.images.pictures import Normalization
from hf_posenc.patching.place.context_length import update_tokenizer_length
from training.checkpoints import latest_complete_checkpoint
from training.data.order import RowsByEpoch
from training.data.pictures import image_processor
from training.errors import SettingsError
from training.files import write_json
from training.launched import launched_on_cpu
from training.processor import processor_name
from training.starting_model import add_lora
from training.study.cells import DIVERGED, FINISHED, IMAGE_CLASSIFICATION, UNSUPPORTED, Cell
from training.study.corpus import study_tokenizer
from training.study.curve import CurveCallback, OnStep, recorded_curve
from training.study.data import CellData, cell_data
from training.study.embedding import Teacher, TeacherTrainer
from training.study.models import Beginning, begin
from training.study.reading import read_dogs, read_lengths, read_picture_dogs
from training.trainer import NonFiniteLossError, SchemeTrainer

#: Rows per forward call of a validation of the small models.
_VALIDATION_ROWS = 256


def run_cell(cell: Cell, on_step: OnStep) -> dict[str, Any]:
    """Runs a training to its end, from its last checkpoint if there is one, and writes `result.json`.

    Returns:
        The result: `status` is "finished"; "unsupported", if the model cannot take the scheme; or "diverged", if the
        loss stopped being a number. The latter two come with a `reason`.
    """
    head, start = cell.head(), None if cell.start is None else cell.start.result()
    if cell.start is not None and start is None:
        raise RuntimeError(f"It starts from {cell.start.name}, which has not ended.")
    if start is not None and start["status"] != FINISHED:
        reason = f"It starts from {start['scheme']!r}, which is {start['status']}: {start['reason']}"
        return _conclude(cell, {**head, "status": UNSUPPORTED, "reason": reason})
    tokenizer = study_tokenizer(cell.study)
    data = cell_data(cell, tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            beginning = begin(cell, data, tokenizer)
            if not cell.task.pretrained:
                # A length that the scheme cannot represent is found before any time goes into training.
                with torch.no_grad():
                    _try_out(cell, beginning.model, data)
        except (ValueError, SequenceLengthError) as error:
            return _conclude(cell, {**head, "status": UNSUPPORTED, "reason": str(error)})
    head["notes"] = sorted({str(one.message) for one in caught if issubclass(one.category, UserWarning)})
    teacher = Teacher(beginning.teacher, data.validation) if cell.task.kind == "embedding" else None
    if cell.goes_on:
        head["before"] = read_lengths(cell, beginning.model, data, tokenizer, teacher, whole=False)
    if beginning.swap is not None:
        # Its options may be those of the old scheme.
        head |= {"config": beginning.swap.new.to_dict(), "swap": beginning.swap.to_dict()}
    try:
        trainer = _trainer(cell, beginning, data, teacher, on_step)
    except PositionEncodingError as error:
        return _conclude(cell, {**head, "status": UNSUPPORTED, "reason": str(error)})
    trained_parameters = sum(one.numel() for one in trainer.model.parameters() if one.requires_grad)
    head |= {"parameters": trained_parameters, "threads": torch.get_num_threads(), "processes": trainer.args.world_size}
    head["processor"] = processor_name()
    try:
        training = _train(cell, trainer)
    except NonFiniteLossError as error:
        return _conclude(cell, {**head, "status": DIVERGED, "reason": str(error)})
    except PositionEncodingError as error:
        return _conclude(cell, {**head, "status": UNSUPPORTED, "reason": str(error)})
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if cell.asked.swap.lora:
        trained = trained.merge_and_unload()
    name = {"generalization": "exact_match", IMAGE_CLASSIFICATION: "by_resolution"}.get(cell.task.kind, "by_length")
    result = {**head, "status": FINISHED, **training, "model": None}
    dog = read_dogs(trained, tokenizer) if data.pictures is None else read_picture_dogs(cell, trained)
    reading = read_lengths(cell, trained, data, tokenizer, teacher, whole=not cell.study.for_rates)
    result |= {name: reading, "dog": dog}
    if cell.keeps_model:
        result["model"] = str(cell.model_folder.relative_to(cell.study_folder))
        if trainer.is_world_process_zero():
            _save(cell, trained, tokenizer if data.pictures is None else _image_processor(cell))
    return _conclude(cell, result)


def _try_out(cell: Cell, model: Any, data: CellData) -> None:
    if data.pictures is None:
        tokens = torch.zeros(1, data.positions, dtype=torch.int64, device=model.device)
        model(input_ids=tokens, **({"decoder_input_ids": tokens} if cell.task.encoder_decoder else {}))
    else:
        batch = data.collate([data.train[0]])
        model(**{name: value for name, value in batch.items() if name != "labels"})


def _train(cell: Cell, trainer: SchemeTrainer) -> dict[str, Any]:
    if not cell.settings.max_steps:
        measured = trainer.evaluate()
        name = next(name for name in ("eval_loss", "eval_similarity") if name in measured)
        point = {f"validation_{name.removeprefix('eval_')}": [round(measured[name], 4)]}
        return {"curve": {"step": [0], "train_loss": [], **point}, "seconds": 0.0, "cpu_seconds": 0.0}
    checkpoint = latest_complete_checkpoint(cell.folder, trainer.args.world_size)
    # A run that goes on from a checkpoint has its first point from there.
    trainer.args.eval_on_start = cell.goes_on and checkpoint is None
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return recorded_curve(trainer.state)


def _trainer(
    cell: Cell, beginning: Beginning, data: CellData, teacher: Teacher | None, on_step: OnStep
) -> SchemeTrainer:
    # accelerate warns at every checkpoint that tied weights are stored once.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    swap, curve = cell.asked.swap, CurveCallback(cell.settings.eval_every, on_step)
    common: dict[str, Any] = {
        "model": add_lora(beginning.model, swap, cell.task.causal) if swap.lora else beginning.model,
        "args": _arguments(cell, data),
        "train_dataset": data.train,
        "eval_dataset": data.validation,
        "data_collator": data.collate,
        "callbacks": [curve, *swap.callbacks()],
    }
    if teacher is not None:
        windows = cell.task.settings.eval_windows
        trainer: SchemeTrainer = TeacherTrainer(**common, teacher=teacher, lengths=cell.task.lengths, windows=windows)
    else:
        hooks = swap.loss_hooks(common["model"], beginning.teacher, cell.task.causal)
        trainer = SchemeTrainer(**common, causal=cell.task.causal, loss_hooks=hooks)
    trainer.remove_callback(PrinterCallback)
    curve.trainer = trainer
    return trainer


def _arguments(cell: Cell, data: CellData) -> TrainingArguments:
    settings, embeds = cell.settings, cell.task.kind == "embedding"
    given = {
        "use_cpu": launched_on_cpu(),
        "lr_scheduler_type": "cosine",
        "adam_beta2": 0.98,
        # Windows are in their order already; packed rows and pictures are not.
        "train_sampling_strategy": "random" if isinstance(data.train, RowsByEpoch) else "sequential",
        "per_device_eval_batch_size": settings.batch_size if cell.task.pretrained else _VALIDATION_ROWS,
        "dataloader_pin_memory": torch.accelerator.is_available(),
    } | settings.trainer
    try:
        arguments = TrainingArguments(
            output_dir=str(cell.folder),
            max_steps=max(1, settings.max_steps),
            learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            seed=cell.seed,
            remove_unused_columns=False,
            label_names=["labels"],
            logging_strategy="no",
            save_steps=settings.checkpoint_every,
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
            **given,
        )
    except (TypeError, ValueError, ImportError) as error:
        raise SettingsError(f"trainer {settings.trainer}: {error}") from error
    # A training item of the embedding task is a whole batch, which cannot be dealt out.
    items = 1 if embeds else settings.batch_size
    sharing = arguments.world_size * (1 if embeds else arguments.gradient_accumulation_steps)
    if items % sharing:
        raise SettingsError(
            f"A batch of {items} item(s) cannot be dealt out to {arguments.world_size} processes x "
            f"{arguments.gradient_accumulation_steps} accumulated batches. Take a --batch_size that is a multiple; the "
            "task 'embedding' needs one process."
        )
    arguments.per_device_train_batch_size = items // sharing
    return arguments


def _image_processor(cell: Cell) -> ViTImageProcessorPil:
    return image_processor(cell.settings.train_resolution, Normalization(), channels=3)


def _save(cell: Cell, model: Any, processor: PreTrainedTokenizerBase | ViTImageProcessorPil) -> None:
    partial = cell.model_folder.with_name(f"{cell.model_folder.name}.partial")
    for folder in (partial, cell.model_folder):
        shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(partial)
    update_tokenizer_length(processor, model)
    processor.save_pretrained(partial)
    partial.rename(cell.model_folder)


def _conclude(cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    state = PartialState()
    if state.is_main_process:
        write_json(cell.folder / "result.json", result)
        for pattern in ("checkpoint-*", "training_args.bin"):
            for path in cell.folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    state.wait_for_everyone()
    return result
