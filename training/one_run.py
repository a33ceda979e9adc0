"""The steps of a training run that all scripts share: starting or resuming, training and saving, and finishing."""

from __future__ import annotations

import errno
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import transformers
from accelerate import PartialState
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_posenc import PositionEncodingError
from hf_posenc.errors import UsageError
from training.arguments import OF_TRAINING, RunArguments, check_effects, check_trainer_arguments, refuse
from training.checkpoints import SETTINGS_FILE, check_run, checkpoint_settings, latest_complete_checkpoint, scheme_code
from training.errors import SettingsError
from training.files import write_json
from training.machine import report
from training.starting_model import weights_digest
from training.trainer import SavingError, SchemeTrainer, TrainingError

#: With `--lora`: the folder for the adapters, inside the output folder.
ADAPTER = "adapter"
#: A disk that is full, over its quota, or cannot be written to.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
#: Errors of an upload: refused by the hub, not connected (the HTTP client has its own errors), or not allowed to
#: connect.
_HUB_ERRORS: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)


def exit_status(program: str, run: Callable[[], Any], *, resumes: bool = True) -> int:
    """Calls `run`, and prints one message instead of a traceback for errors that a user can fix.

    Returns:
        0; 1 if the training had to stop; 2 for invalid arguments; 130 if interrupted.
    """
    try:
        run()
    except (SettingsError, PositionEncodingError, UsageError) as error:
        return report(program, error, 2)
    except TrainingError as error:
        return report(program, error, 1, every_process=isinstance(error, SavingError))
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in _UNWRITABLE:
            raise
        message = f"{error} Complete checkpoints are kept. Free some space and run the same command again to resume."
        return report(program, message, 1, every_process=True)
    except KeyboardInterrupt:
        again = "Run the same command again to resume from the last checkpoint." if resumes else "Nothing was saved."
        print(f"\nInterrupted. {again}", file=sys.stderr)
        return 130
    return 0


def trains(arguments: TrainingArguments) -> bool:
    """Whether a run trains, instead of only evaluating."""
    # Trainer sets do_eval itself if it evaluates during training.
    return arguments.do_train or arguments.eval_strategy != IntervalStrategy.NO or not arguments.do_eval


def set_up(arguments: TrainingArguments, *options: Any) -> None:
    """Sets up logging: all messages of the first process, errors of the others. Raises `SettingsError` for invalid
    arguments of the Trainer, and for those and `options` that have no effect.
    """
    level = logging.INFO if arguments.should_log else logging.ERROR
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", level=level)
    for library in ("httpx", "accelerate", "datasets"):
        logging.getLogger(library).setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity(arguments.get_process_log_level())
    if not arguments.should_log:
        datasets.utils.logging.set_verbosity_error()
        datasets.disable_progress_bars()
    arguments.remove_unused_columns = False  # the collator needs columns that the model does not take
    check_trainer_arguments(arguments, lora=any(getattr(group, "lora", False) for group in options))
    check_effects(arguments, *options)
    if not trains(arguments):
        refuse("has no effect, because the run only evaluates. Also give --do_train.", OF_TRAINING, *options)


def start(
    run: RunArguments, arguments: TrainingArguments, model: Any, decisive: dict[str, Any], **options: Any
) -> tuple[SchemeTrainer, Path | None]:
    """Returns the trainer of a run, and the checkpoint to resume from if the output folder has one of this run.

    At its beginning, a run records everything that must stay the same for it to resume: the arguments of the Trainer,
    `decisive` (see `checkpoint_settings`), the initial weights, and the code of a user's own scheme.

    Args:
        run: what to do if the output folder is not empty.
        arguments: arguments of the Trainer.
        model: the model to train.
        decisive: other settings that the curve depends on, by name.
        **options: further arguments of `SchemeTrainer`.
    """
    settings = checkpoint_settings(arguments, initial_weights=weights_digest(model), **decisive)
    encoding = getattr(model, "position_encoding", None)
    settings |= scheme_code(None if encoding is None else encoding.config)
    state, folder = PartialState(), Path(str(arguments.output_dir))
    if run.overwrite_output_dir:
        if state.is_main_process and (folder / SETTINGS_FILE).exists():
            shutil.rmtree(folder)
        state.wait_for_everyone()
    begun = check_run(folder, settings)
    checkpoint = latest_complete_checkpoint(folder, arguments.world_size) if begun else None
    state.wait_for_everyone()
    if checkpoint is not None and state.is_main_process:
        print(f"Resuming from {checkpoint}.", file=sys.stderr)
    try:
        SchemeTrainer.get_optimizer_cls_and_kwargs(arguments, model)  # the optimizer of --optim may not be installed
        trainer = SchemeTrainer(model=model, args=arguments, **options)
    except _HUB_ERRORS as error:
        written = "--push_to_hub" if arguments.push_to_hub else f"--output_dir {folder}"
        raise SettingsError(f"{written}: {error}") from error
    except (ValueError, ImportError, RuntimeError) as error:  # for example a tracker that is not installed
        raise SettingsError(str(error)) from error
    if trainer.is_world_process_zero() and not (folder / SETTINGS_FILE).exists():
        write_json(folder / SETTINGS_FILE, settings)
    return trainer, checkpoint


def train_and_evaluate(trainer: SchemeTrainer, checkpoint: Path | None, *, adapter: bool = False) -> dict[str, float]:
    """Trains to the end, saves the model and evaluates it, as the arguments ask for. Returns the metrics.

    Args:
        trainer: the trainer of the run.
        checkpoint: the checkpoint to resume from.
        adapter: whether only adapters were trained. They are saved in a separate folder and then merged into the
            weights, so that the whole model loads without peft.
    """
    results: dict[str, float] = {}
    if trains(trainer.args):
        outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.log_metrics("train", outcome.metrics)
        if trainer.is_fsdp_enabled:
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.require_finite_weights()
        # An internal call does not upload.
        trainer.save_model(str(Path(str(trainer.args.output_dir), ADAPTER)) if adapter else None, _internal_call=True)
        trainer.save_state()
        results |= outcome.metrics
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    if trains(trainer.args) and adapter:
        trainer.model = trainer.model_wrapped = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        trainer.save_model(_internal_call=True)
    return results | metrics


def finish(trainer: SchemeTrainer, results: dict[str, float]) -> None:
    """Writes the metrics of a run, and pushes its model to the hub."""
    folder = Path(str(trainer.args.output_dir))
    if trainer.is_world_process_zero():
        write_json(folder / "all_results.json", results)
    if trains(trainer.args) and trainer.args.push_to_hub:
        try:
            trainer.push_to_hub()
        except _HUB_ERRORS as error:
            raise TrainingError(
                f"The model is complete in {folder}, but could not be pushed to the hub: {error} Run the same command "
                "again to push it."
            ) from error
