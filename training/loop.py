"""One training: a task, a scheme, a curve; resumable to the bit."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, get_cosine_schedule_with_warmup

from hf_posenc import SequenceLengthError
from hf_posenc.metrics import MeasurementError, dog_test
from hf_posenc.recipes.parameter_groups import undecayed_scheme_parameters
from training.batches import Collator, TrainingWindows, validation_batch, validation_windows
from training.corpus import Corpus, load_tokenizer
from training.evaluation import loss_by_length, validation_loss
from training.files import latest_checkpoint, read_json, remove_checkpoints, save_checkpoint, write_json
from training.models import build_model, trainable_parameters
from training.settings import CompareSettings

#: Called after every step with the number of steps that are done.
OnStep = Callable[[int], None]

FINISHED, UNSUPPORTED, DIVERGED, FAILED = "finished", "unsupported", "diverged", "failed"


@dataclass
class Training:
    """One of the trainings of a comparison."""

    settings: CompareSettings
    task: str
    scheme: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Such as `causal-alibi`; also the name of its folder."""
        return f"{self.task}-{self.scheme}"

    @property
    def folder(self) -> Path:
        """Where its checkpoints and its result go."""
        return Path(self.settings.output_dir) / "trainings" / self.name

    def result(self) -> dict[str, Any] | None:
        """What this training came to, if it has ended."""
        result: dict[str, Any] | None = read_json(self.folder / "result.json")
        return result


@dataclass
class Progress:
    """What a training has recorded so far; part of its checkpoints."""

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    train_loss_sum: float = 0.0
    curve: dict[str, list[float]] = field(default_factory=lambda: {"step": [], "train_loss": [], "validation_loss": []})

    def state_dict(self) -> dict[str, Any]:
        """For accelerate's checkpoints."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From accelerate's checkpoints."""
        vars(self).update(state)


def run_training(training: Training, on_step: OnStep) -> dict[str, Any]:
    """Runs a training to its end, from its last checkpoint if there is one, and writes `result.json`.

    Returns:
        The result: `status` is "finished"; "unsupported", if the model cannot take the scheme; or "diverged", if the
        loss stopped being a number. The latter two come with a `reason`.
    """
    settings = training.settings
    tokenizer = load_tokenizer(settings.tokenizer_name)
    head: dict[str, Any] = {"task": training.task, "scheme": training.scheme, "options": training.options}
    # accelerate warns at every checkpoint that tied weights are stored once.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = build_model(training.task, training.scheme, training.options, tokenizer, settings)
            _check_length(model, settings.max_length)
        except (ValueError, SequenceLengthError) as error:
            return _conclude(training, accelerator, {**head, "status": UNSUPPORTED, "reason": str(error)})
    notes = sorted({str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)})
    head |= {"notes": notes, "parameters": trainable_parameters(model)}
    result = _train(training, accelerator, model, tokenizer, on_step)
    if settings.save_models and result["status"] == FINISHED and accelerator.is_main_process:
        target = Path(settings.output_dir) / "models" / training.name
        accelerator.unwrap_model(model).save_pretrained(target)
        tokenizer.save_pretrained(target)
    return _conclude(training, accelerator, {**head, **result})


@torch.no_grad()
def _check_length(model: Any, length: int) -> None:
    """Reads a sequence of the longest evaluated length, before any time goes into training.

    Raises:
        SequenceLengthError: if the scheme cannot represent that length.
    """
    model(input_ids=torch.zeros(1, length, dtype=torch.int64))


def _train(
    training: Training, accelerator: Accelerator, model: Any, tokenizer: PreTrainedTokenizerBase, on_step: OnStep
) -> dict[str, Any]:
    settings = training.settings
    causal = training.task == "causal"
    train_stream, validation_stream = Corpus.open_streams(Path(settings.output_dir) / "data")
    validation = validation_batch(validation_windows(validation_stream, settings), tokenizer, training.task, settings)
    undecayed = undecayed_scheme_parameters(model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in trained if name not in undecayed]},
        {"params": [parameter for name, parameter in trained if name in undecayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, settings.warmup_steps, settings.max_steps)
    loader = DataLoader(
        TrainingWindows(train_stream, settings),
        batch_size=settings.batch_size,
        collate_fn=Collator(tokenizer, training.task, settings),
    )
    prepared, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoint = latest_checkpoint(training.folder)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        on_step(progress.step)
    prepared.train()
    started = time.monotonic() - progress.seconds
    cpu_started = time.process_time() - progress.cpu_seconds
    for batch in accelerator.skip_first_batches(loader, progress.step):
        loss = prepared(**batch).loss
        value = float(accelerator.reduce(loss.detach(), "mean"))
        if not math.isfinite(value):
            return _diverged("training", value, progress, started)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.train_loss_sum += value
        if progress.step % settings.eval_every == 0 or progress.step == settings.max_steps:
            value = validation_loss(accelerator.unwrap_model(model), validation, settings, causal)
            if not math.isfinite(value):
                return _diverged("validation", value, progress, started)
            _record(progress, value)
        progress.seconds = time.monotonic() - started
        progress.cpu_seconds = time.process_time() - cpu_started
        if progress.step % settings.checkpoint_every == 0 and progress.step < settings.max_steps:
            save_checkpoint(accelerator, training.folder, progress.step)
        on_step(progress.step)
    trained = accelerator.unwrap_model(model)
    lengths = loss_by_length(trained, validation, settings, causal)
    dog = _dog(trained, tokenizer)
    return {
        "status": FINISHED,
        "seconds": round(time.monotonic() - started, 3),
        "cpu_seconds": round(time.process_time() - cpu_started, 3),
        "curve": progress.curve,
        "by_length": lengths,
        "dog": dog,
    }


def _diverged(which: str, value: float, progress: Progress, started: float) -> dict[str, Any]:
    return {
        "status": DIVERGED,
        "reason": f"The {which} loss became {value} at step {progress.step}; try a lower --learning_rate.",
        "seconds": round(time.monotonic() - started, 3),
        "curve": progress.curve,
    }


def _record(progress: Progress, validation: float) -> None:
    curve = progress.curve
    previous = curve["step"][-1] if curve["step"] else 0
    curve["step"].append(progress.step)
    curve["train_loss"].append(round(progress.train_loss_sum / (progress.step - previous), 4))
    curve["validation_loss"].append(round(validation, 4))
    progress.train_loss_sum = 0.0


def _dog(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Distance between the two dogs of the dog test, embeddings first, then layer by layer."""
    try:
        result = dog_test(model, tokenizer)
    except MeasurementError as error:
        return {"error": str(error)}
    row = result.rows[0]
    if row.error is not None:
        return {"error": row.error}
    return {
        "layers": [float(f"{distance.relative_l2:.4g}") for distance in row.layers],
        "probe": None if row.probe is None else float(f"{row.probe:.4g}"),
        "told_apart": row.told_apart,
    }


def _conclude(training: Training, accelerator: Accelerator, result: dict[str, Any]) -> dict[str, Any]:
    if accelerator.is_main_process:
        write_json(training.folder / "result.json", result)
        remove_checkpoints(training.folder)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return result
