"""One training run, from parsed arguments to a saved model and its figures."""

from __future__ import annotations

import errno
import logging
import math
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import transformers
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_posenc import PositionEncodingError
from training.arguments import (
    DataArguments,
    LoraArguments,
    ModelArguments,
    RunArguments,
    SchemeArguments,
    check_trainer_arguments,
)
from training.checkpoints import (
    SETTINGS_FILE,
    check_run,
    checkpoint_settings,
    incompleteness,
    latest_complete_checkpoint,
    record_run,
)
from training.data.blocking import Batches, check_reads, find_blocking
from training.data.order import EpochOrder
from training.data.packing import DOCUMENTS
from training.data.rows import load_rows
from training.errors import SettingsError
from training.files import write_json
from training.hub import HUB_ERRORS
from training.launched import report
from training.starting_model import add_lora, apply_scheme, build_model, load_tokenizer, weights_digest
from training.trainer import SavingError, SchemeTrainer, TrainingError, row_order

if TYPE_CHECKING:
    from training.healing_run import Healing

logger = logging.getLogger(__name__)

#: With `--lora`: the folder, inside the output folder, of what was trained.
ADAPTER = "adapter"

#: A disk that is full, over its quota, or cannot be written to.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


@dataclass(frozen=True)
class RunInput:
    """All arguments of a run."""

    model: ModelArguments
    scheme: SchemeArguments
    data: DataArguments
    lora: LoraArguments
    run: RunArguments
    trainer: TrainingArguments


def exit_status(program: str, run: Callable[[], Any]) -> int:
    """Runs, with one message in place of a traceback for what a user can mend.

    Returns:
        0, or 1 if the training had to stop, 2 for arguments that cannot work, 130 if interrupted.
    """
    try:
        run()
    except (SettingsError, PositionEncodingError) as error:
        return report(program, error, 2)
    except TrainingError as error:
        return report(program, error, 1, every_process=isinstance(error, SavingError))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        message = f"{error} Nothing that was complete is lost: make room, then run the same command again to go on."
        return report(program, OSError(message), 1, every_process=True)
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again to go on from the last checkpoint.", file=sys.stderr)
        return 130
    return 0


def train_language_model(given: RunInput, causal: bool, healing: Healing | None = None) -> dict[str, float]:
    """Trains and evaluates; resumes if the output folder holds this run's checkpoints.

    Everything that can be wrong with the arguments is found before anything is written.

    Args:
        given: all arguments.
        causal: the next token, rather than masked ones.
        healing: how a trained model takes over its scheme, and what helps it to recover.

    Returns:
        The content of `all_results.json`.

    Raises:
        SettingsError: for arguments that cannot work.
        TrainingError: if the training had to stop.
    """
    arguments = given.trainer
    _set_up_logging(arguments)
    arguments.remove_unused_columns = False  # the collator needs what the model does not take
    check_trainer_arguments(arguments)
    if given.lora.lora and arguments.push_to_hub and arguments.hub_strategy != "end":
        raise SettingsError(
            f"--hub_strategy {arguments.hub_strategy} would upload adapters while training, and beside an adapter the "
            "merged model of the end could not be loaded. With --lora give --hub_strategy end."
        )
    tokenizer = load_tokenizer(given.model, causal)
    with arguments.main_process_first(desc="loading and tokenising"):
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        train, validation, text = load_rows(given.data, tokenizer, causal, seed)
    # Trainer sets do_eval itself where it evaluates while training.
    trains = arguments.do_train or arguments.eval_strategy != IntervalStrategy.NO or not arguments.do_eval
    if trains:
        steps = _planned_steps(row_order(len(train), arguments), arguments)
        if healing is not None:
            healing.check_schedule(arguments, steps)
    model, batches = prepare_model(given, tokenizer, causal, healing)
    settings = checkpoint_settings(
        arguments,
        objective="causal" if causal else "masked",
        train_text=train.stream.digest(),
        initial_weights=weights_digest(model),
        block_size=given.data.block_size,
        packing=given.data.packing,
        mlm_probability=None if causal else given.data.mlm_probability,
        scheme=given.scheme,
        lora=given.lora,
        **({} if healing is None else healing.settings()),
    )
    if arguments.load_best_model_at_end:
        settings["validation_text"] = validation.stream.digest()
    begun, checkpoint = _starting_point(given, settings)
    try:
        SchemeTrainer.get_optimizer_cls_and_kwargs(arguments, model)  # --optim may name one that is not installed
        trainer = SchemeTrainer(
            model=model,
            args=arguments,
            causal=causal,
            train_dataset=train,
            eval_dataset=validation,
            data_collator=batches,
            processing_class=tokenizer,
            callbacks=[] if healing is None else healing.callbacks(),
            loss_hooks=[] if healing is None else healing.loss_hooks(),
        )
    except HUB_ERRORS as error:
        written = "--push_to_hub" if arguments.push_to_hub else f"--output_dir {arguments.output_dir}"
        raise SettingsError(f"{written}: {error}") from error
    except (ValueError, ImportError) as error:
        raise SettingsError(str(error)) from error
    if trainer.is_world_process_zero() and not begun:
        record_run(str(arguments.output_dir), settings)
    results: dict[str, float] = {"train_rows": len(train), "eval_rows": len(validation)}
    logger.info("%s", text)
    if trains:
        outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.log_metrics("train", outcome.metrics)
        results |= outcome.metrics
        if trainer.is_fsdp_enabled:
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(str(Path(str(arguments.output_dir)) / ADAPTER) if given.lora.lora else None)
        trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    results |= metrics
    if trains and given.lora.lora:
        _save_merged(trainer)
    if trainer.is_world_process_zero():
        write_json(Path(str(arguments.output_dir)) / "all_results.json", results)
    if trains and arguments.push_to_hub:
        trainer.push_to_hub()
    return results


def prepare_model(
    given: RunInput, tokenizer: PreTrainedTokenizerBase, causal: bool, healing: Healing | None = None
) -> tuple[Any, Batches]:
    """The model as it will be trained, and how its batches are made.

    Raises:
        SettingsError: if it cannot be built, take the scheme, read rows of this length, or keep documents apart.
    """
    model = build_model(given.model, tokenizer, causal, given.trainer.seed)
    if healing is not None:
        healing.before_scheme(model)
    with warnings.catch_warnings():
        if healing is not None and healing.patches_again:
            warnings.simplefilter("ignore", UserWarning)  # of this patch, which shows only that the scheme fits
        apply_scheme(model, given.scheme)
    if healing is not None:
        healing.after_scheme(model)
    size, vocabulary = given.data.block_size, len(tokenizer)
    check_reads(model, size, causal, vocabulary)
    blocking = find_blocking(model, size, causal, vocabulary) if given.data.packing == DOCUMENTS else None
    if given.lora.lora:
        model = add_lora(model, given.lora, causal)
    return model, Batches(blocking)


def _starting_point(given: RunInput, settings: dict[str, Any]) -> tuple[bool, Path | None]:
    """Whether the output folder holds this run already, and the checkpoint to resume from."""
    arguments = given.trainer
    folder, state = Path(str(arguments.output_dir)), PartialState()
    if given.run.overwrite_output_dir:
        if arguments.resume_from_checkpoint:
            raise SettingsError("--overwrite_output_dir throws away what --resume_from_checkpoint would go on from.")
        if state.is_main_process and (folder / SETTINGS_FILE).exists():
            shutil.rmtree(folder)
        state.wait_for_everyone()
    begun = check_run(folder, settings)
    named = arguments.resume_from_checkpoint
    checkpoint = latest_complete_checkpoint(folder, arguments.world_size) if begun else None
    if named is not None and named.lower() not in ("true", "latest"):
        checkpoint = Path(named)
        problem = incompleteness(checkpoint, arguments.world_size)
        if problem is not None:
            raise SettingsError(f"--resume_from_checkpoint {named} cannot be resumed from: {problem}.")
    elif named is not None and checkpoint is None:
        raise SettingsError(f"--resume_from_checkpoint: {folder} holds no complete checkpoint.")
    state.wait_for_everyone()
    if checkpoint is not None and state.is_main_process:
        print(f"Resuming from {checkpoint}.", file=sys.stderr)
    return begun, checkpoint


def _planned_steps(order: EpochOrder, arguments: TrainingArguments) -> int:
    """How many updates a run takes; `order` reads whole batches only."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    batch = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    return math.ceil(arguments.num_train_epochs * (len(order) // batch))


def _save_merged(trainer: SchemeTrainer) -> None:
    """The whole model, with what LoRA learned added to its weights: it loads without peft."""
    trainer.model = trainer.model_wrapped = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    trainer.save_model()


def _set_up_logging(arguments: TrainingArguments) -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        level=logging.INFO if arguments.should_log else logging.ERROR,
    )
    for library in ("httpx", "accelerate", "datasets"):
        logging.getLogger(library).setLevel(logging.WARNING)
    level = arguments.get_process_log_level()
    transformers.utils.logging.set_verbosity(level)
    if not arguments.should_log:
        datasets.utils.logging.set_verbosity_error()
        datasets.disable_progress_bars()
