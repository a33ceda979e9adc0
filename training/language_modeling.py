"""One training run, from parsed arguments to a saved model and its figures."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments

from hf_posenc.patching.place.context_length import context_length, update_tokenizer_length
from hf_posenc.recipes import frozen_teacher
from training.argument_files import parse_arguments
from training.arguments import (
    DataArguments,
    LoraArguments,
    ModelArguments,
    RunArguments,
    SchemeArguments,
    check_trainer_arguments,
)
from training.checkpoints import SETTINGS_FILE, checkpoint_settings
from training.data.blocking import Batches, check_reads, find_blocking
from training.data.packing import PackedRows
from training.data.rows import load_rows
from training.errors import SettingsError
from training.files import write_json
from training.one_run import build_trainer, exit_status, finish, set_up_logging, starting_point, train_and_save, trains
from training.scheme_code import note_scheme_code
from training.starting_model import add_lora, apply_scheme, build_model, check_scheme, load_tokenizer, weights_digest
from training.swapping import HealingArguments
from training.trainer import row_order

logger = logging.getLogger(__name__)

#: With `--lora`: the folder, inside the output folder, of what was trained.
ADAPTER = "adapter"

_ARGUMENTS = (
    ModelArguments, SchemeArguments, DataArguments, LoraArguments, RunArguments, TrainingArguments, HealingArguments,
)  # fmt: skip


@dataclass(frozen=True)
class RunInput:
    """All arguments of a run."""

    model: ModelArguments
    scheme: SchemeArguments
    data: DataArguments
    lora: LoraArguments
    run: RunArguments
    trainer: TrainingArguments
    healing: HealingArguments

    def check_healing(self, causal: bool) -> None:
        """Raises `SettingsError` if there is nothing to swap, or nothing to learn from."""
        healing = self.healing
        healing.check_objective(causal)
        if healing.swaps and (self.scheme.scheme is None or self.scheme.scheme_layers is not None):
            raise SettingsError(
                "--initialization and --gradual_steps are about a new scheme: give --scheme, for some layers only as "
                '\'{"scheme": "schedule", "layers": [...]}\' without --scheme_layers.'
            )
        if (healing.swaps or healing.distill) and self.model.model_name_or_path is None:
            raise SettingsError(
                "--initialization, --gradual_steps and --distill take over what a model has learned: give "
                "--model_name_or_path."
            )


def run_language_model(program: str, words: list[str] | None, description: str | None, causal: bool) -> int:
    """The command line of `run_clm.py` and `run_mlm.py`. Returns the exit status, see `exit_status`.

    Args:
        program: name of the script, for messages.
        words: of the command line; by default those of the process.
        description: for `--help`.
        causal: the next token, rather than masked ones.
    """

    def run() -> None:
        given = parse_arguments(_ARGUMENTS, sys.argv[1:] if words is None else words, description)
        train_language_model(RunInput(*given), causal)

    return exit_status(program, run)


def train_language_model(given: RunInput, causal: bool) -> dict[str, float]:
    """Trains and evaluates; resumes if the output folder holds this run's checkpoints.

    All arguments are checked before anything is written.

    Args:
        given: all arguments.
        causal: the next token, rather than masked ones.

    Returns:
        The content of `all_results.json`.

    Raises:
        SettingsError: for arguments that cannot work.
        TrainingError: if the training had to stop.
    """
    arguments, healing, lora = given.trainer, given.healing, given.lora.lora
    folder = Path(str(arguments.output_dir))
    set_up_logging(arguments)
    arguments.remove_unused_columns = False  # the collator needs what the model does not take
    check_trainer_arguments(arguments)
    if lora and arguments.push_to_hub and arguments.hub_strategy != "end":
        raise SettingsError(
            f"--hub_strategy {arguments.hub_strategy} would upload adapters while training, and beside an adapter the "
            "merged model of the end could not be loaded. With --lora give --hub_strategy end."
        )
    given.check_healing(causal)
    check_scheme(given.scheme)
    tokenizer = load_tokenizer(given.model, causal)
    with arguments.main_process_first(desc="loading and tokenising"):
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        train, validation, text = load_rows(given.data, tokenizer, causal, seed)
    callbacks: list[Any] = healing.callbacks()
    if trains(arguments):
        order = row_order(len(train), arguments)
        steps = math.ceil(arguments.num_train_epochs * (len(order) // order.multiple))
        steps = arguments.max_steps if arguments.max_steps > 0 else steps
        healing.check_training(steps, lora)
        try:
            for callback in callbacks:
                callback.check_training(arguments, steps)
        except ValueError as error:
            raise SettingsError(f"--gradual_steps {healing.gradual_steps}: {error}") from error
    model, teacher, batches = prepare_model(given, tokenizer, causal, train)
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
        **({"healing": dataclasses.asdict(healing)} if healing.swaps or healing.teaches else {}),
    )
    if arguments.load_best_model_at_end:
        settings["validation_text"] = validation.stream.digest()
    note_scheme_code(settings, model)
    begun, checkpoint = starting_point(given.run, arguments, settings)
    trainer = build_trainer(
        arguments,
        model,
        causal=causal,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=batches,
        processing_class=tokenizer,
        callbacks=callbacks,
        loss_hooks=healing.loss_hooks(model, teacher, causal),
    )
    if trainer.is_world_process_zero() and not begun:
        write_json(folder / SETTINGS_FILE, settings)
    results: dict[str, float] = {"train_rows": len(train), "eval_rows": len(validation)}
    logger.info("%s", text)
    if trains(arguments):
        results |= train_and_save(trainer, checkpoint, folder / ADAPTER if lora else None)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    results |= metrics
    if trains(arguments) and lora:
        # The whole model, with what LoRA learned added to its weights: it loads without peft.
        trainer.model = trainer.model_wrapped = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        trainer.save_model(_internal_call=True)
    finish(trainer, results, pushes=trains(arguments) and arguments.push_to_hub)
    return results


def prepare_model(
    given: RunInput, tokenizer: PreTrainedTokenizerBase, causal: bool, rows: PackedRows
) -> tuple[Any, Any, Batches]:
    """Returns the model as it will be trained, its teacher or `None`, and the collator of its batches.

    Raises:
        SettingsError: if it cannot be built, take the scheme, read rows of this length, or keep documents apart.
    """
    model = build_model(given.model, tokenizer, causal, given.trainer.seed)
    teacher = frozen_teacher(model) if given.healing.distill else None
    before = context_length(model)
    apply_scheme(model, given.scheme, given.healing, rows)
    update_tokenizer_length(tokenizer, model, before)
    size, vocabulary = given.data.block_size, len(tokenizer)
    check_reads(model, size, causal, vocabulary)
    blocking = find_blocking(model, size, causal, vocabulary) if given.data.packing == "documents" else None
    return add_lora(model, given.lora, causal) if given.lora.lora else model, teacher, Batches(blocking)
