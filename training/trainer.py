"""`transformers.Trainer` for models with a scheme, with exact sums, exact resumption, and no silent failures."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.modelcard import extract_hyperparameters_from_trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from hf_posenc.checkpoint import model_card
from hf_posenc.recipes.trained_parameters import undecayed_scheme_parameters
from training.checkpoints import PROGRESS_FILE, incompleteness, record_progress, stored_names
from training.data.order import EpochOrder, RowsByEpoch
from training.errors import SettingsError
from training.objectives import evaluation_metrics, row_sums, summed_cross_entropy, target_count

#: Called during training with the inputs of a batch (including labels), the output of the model, the loss so far, and
#: the number of targets in the whole update (over all processes and accumulated batches). Returns the training loss.
LossHook = Callable[[Mapping[str, Any], Any, Tensor, Tensor], Tensor]

#: Metrics of held-out data in a model card.
_RESULTS = ("eval_loss", "eval_perplexity", "eval_accuracy")


class TrainingError(RuntimeError):
    """A run that cannot continue. The message says what happened and what to do."""


class NonFiniteLossError(TrainingError):
    """The loss, or a weight, is NaN or infinite."""


class SavingError(TrainingError):
    """A checkpoint could not be written."""


class SchemeTrainer(Trainer):
    """A `Trainer` whose curve depends only on its settings.

    - The loss is the mean over all targets of an update (tokens, or rows for a classifier), however they are
      distributed over processes and accumulated batches. The evaluation loss is the mean over all targets. The
      perplexity, or the accuracy of a classifier, is also logged.
    - Parameters that a scheme's paper trains without weight decay are trained without it.
    - A loss that is NaN or infinite stops the run before the weights change. Such weights are never saved.
    - A checkpoint that could not be written is removed, and the run stops with a `SavingError`.
    - A resumed run logs the same numbers as an uninterrupted one, even if it stopped between two logs.
      Evaluation does not change the random numbers of training.

    Args:
        *args: arguments of `Trainer`.
        causal: whether each place predicts the next token (causal language modelling), rather than its own (masked
            language modelling, and the classes of a classifier).
        loss_hooks: each replaces the training loss in turn, for example to add the loss of a teacher.
        **kwargs: arguments of `Trainer`. Rows of a `RowsByEpoch` dataset are read by epoch, in whole batches.
    """

    def __init__(self, *args: Any, causal: bool, loss_hooks: Sequence[LossHook] = (), **kwargs: Any) -> None:
        self.causal = causal
        self.loss_hooks = tuple(loss_hooks)
        self._update_loss: Tensor | None = None
        self._row_order: EpochOrder | None = None
        self._resumed_from: str | None = None
        super().__init__(
            *args,
            # Makes Trainer count the targets of an update, and leave the division by accumulated batches to the loss.
            compute_loss_func=self._mean_loss,
            compute_metrics=evaluation_metrics,
            preprocess_logits_for_metrics=self._row_sums,
            **kwargs,
        )
        self._loss_shifts_labels = causal
        self.add_callback(_LoadProgress(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Raises `SettingsError` for sharding (FSDP) that would have no effect, or that cannot be saved."""
        super().create_accelerator_and_postprocess()
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not self.is_fsdp_enabled:
            raise SettingsError(
                "FSDP is set, but accelerate only shards on accelerators. Here it would train unsharded copies without "
                "a warning. On CPUs use training/accelerate/ddp_cpu.yaml."
            )
        if self.is_fsdp_enabled and hasattr(self.model, "peft_config"):
            raise SettingsError(
                "--lora with FSDP is not supported here. Use DDP, which needs little memory with --lora."
            )

    # What is optimised

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Like Trainer's, but without the parameters that the scheme's paper trains without weight decay."""
        undecayed = undecayed_scheme_parameters(model)
        return [name for name in super().get_decay_parameter_names(model) if name not in undecayed]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Returns the mean cross-entropy per target, times the number of processes, because DDP averages over them."""
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = self._mean_loss(outputs, labels, num_items_in_batch)
        if model.training:
            items = self._items(labels, num_items_in_batch)
            for hook in self.loss_hooks:
                loss = hook(inputs, outputs, loss, items)
        # Trainer's method would multiply by the number of GPUs with DataParallel, which gathers the logits here.
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _mean_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        smoothing = self.args.label_smoothing_factor if self.model.training else 0.0
        summed = summed_cross_entropy(outputs.logits, labels, self.causal, smoothing)
        return summed / self._items(labels, num_items_in_batch).to(summed.device)

    def _items(self, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        items = target_count(labels, self.causal) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        return items.clamp(min=1)

    def _row_sums(self, logits: Any, labels: Tensor) -> Tensor:
        return row_sums(logits[0] if isinstance(logits, tuple) else logits, labels, self.causal)

    # Rows

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if not isinstance(dataset, RowsByEpoch):
            return super()._get_train_sampler(train_dataset)
        self._row_order = row_order(len(dataset), self.args)
        return self._row_order

    def _run_epoch(self, **arguments: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # resumed at the end: Trainer would do one more step
            self.control.should_training_stop = True
            return
        if self._row_order is not None:
            # accelerate does not reach a sampler inside two wrappers. When several processes resume, there are two.
            self._row_order.set_epoch(arguments["epoch"])
        super()._run_epoch(**arguments)

    # NaN and infinity

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Runs one forward and backward pass."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._update_loss = loss if self._update_loss is None else self._update_loss + loss
        if self.accelerator.sync_gradients:
            total = float(self.accelerator.reduce(self._update_loss, "sum"))
            self._update_loss = None
            if not math.isfinite(total):
                step = self.state.global_step + 1
                raise NonFiniteLossError(
                    f"The loss became {total} at step {step}. The weights are still those of step {step - 1}, and no "
                    "checkpoint is affected. Try a lower --learning_rate, a longer warmup (--warmup_steps), a "
                    "smaller --max_grad_norm, or bf16 instead of fp16."
                )
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates without changing the random numbers of training."""
        with torch.random.fork_rng(devices=[self.args.device] if self.args.device.type == "cuda" else []):
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        for name, value in metrics.items():
            if name.endswith("_loss") and not math.isfinite(value):
                raise NonFiniteLossError(
                    f"{name} is {value} after step {self.state.global_step}. Either no token of the evaluation data is "
                    "a target, or the model has diverged: try a lower --learning_rate."
                )
        return metrics

    def require_finite_weights(self) -> None:
        """Raises `NonFiniteLossError`, on all processes, if a trained weight is NaN or infinite."""
        wrong = []
        for name, parameter in self.model.named_parameters():
            # For a sharded parameter, the part of this process.
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if parameter.requires_grad and not local.detach().isfinite().all():
                wrong.append(name)
        if self.accelerator.reduce(torch.tensor(len(wrong), device=self.args.device), "sum"):
            raise NonFiniteLossError(
                f"After step {self.state.global_step}, {wrong[:3] or 'a parameter of another process'} has NaN or "
                f"infinity, so checkpoint-{self.state.global_step} was not written; earlier ones are unchanged. Try "
                "a lower --learning_rate or a smaller --max_grad_norm."
            )

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Raises `SavingError` if the checkpoint cannot be written, and removes the incomplete checkpoint."""
        self.require_finite_weights()
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        # A folder with the same name is from an earlier attempt. Overwriting it would mix the two.
        if self.args.should_save and folder.exists():
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            if incompleteness(folder, self.args.world_size) is None:  # a later step failed: pushing, or rotating
                raise
            shutil.rmtree(folder, ignore_errors=True)
            raise SavingError(
                f"{folder} could not be written ({type(error).__name__}: {error}); the incomplete folder was removed. "
                "Earlier checkpoints are unchanged. Make room on the disk (--save_total_limit keeps fewer "
                "checkpoints), then run the same command again to resume."
            ) from error

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # Gathering waits until every process has written its files.
        losses = self.accelerator.gather(self._tr_loss.detach().reshape(1)).tolist()
        if self.args.should_save:
            total, logged_at = self._total_loss_scalar, self._globalstep_last_logged
            record_progress(Path(output_dir), {"since_log": losses, "total": total, "logged_at": logged_at})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_renamed_weights(Path(resume_from_checkpoint), model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_renamed_weights(Path(str(self.state.best_model_checkpoint)))

    def _load_renamed_weights(self, checkpoint: Path, model: nn.Module | None = None) -> None:
        """Loads weights whose names on disk differ from those of the modules, as in ViT.

        `Trainer` looks up each name in the model, and would not load the weights of renamed modules.
        """
        whole = self.accelerator.unwrap_model(self.model if model is None else model)
        names = stored_names(checkpoint)
        if not isinstance(whole, PreTrainedModel) or names <= whole.state_dict().keys():
            return
        loaded = type(whole).from_pretrained(checkpoint, dtype=whole.dtype)
        whole.load_state_dict(loaded.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._resumed_from = checkpoint

    def load_progress(self) -> None:
        """Restores the part of the mean loss that an interrupted run had summed but not logged."""
        if self._resumed_from is not None:
            progress = json.loads(Path(self._resumed_from, PROGRESS_FILE).read_text(encoding="utf-8"))
            self._tr_loss.fill_(progress["since_log"][self.args.process_index])
            self._total_loss_scalar = progress["total"]
            self._globalstep_last_logged = progress["logged_at"]

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        output = super()._finalize_training(trial, num_train_samples, start_time)
        return output._replace(training_loss=output.metrics["train_loss"])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Like Trainer's, but the final `train_loss` is the mean over the whole run, even if it was resumed."""
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Like Trainer's, but for a patched model the card names the scheme and shows how to load the model."""
        model = self.accelerator.unwrap_model(self.model)
        if getattr(model, "position_encoding", None) is None:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            shown = extract_hyperparameters_from_trainer(self) | {"steps": self.state.global_step}
            for entry in self.state.log_history:
                shown |= {name: round(value, 4) for name, value in entry.items() if name in _RESULTS}
            section = "\n".join(f"- {name}: {value}" for name, value in shown.items())
            model_id = self.hub_model_id or Path(str(self.args.output_dir)).name
            card = model_card(model, model_id=model_id, sections={"Training": section})
            card.save(Path(str(self.args.output_dir)) / "README.md")


def data_seed(arguments: TrainingArguments) -> int:
    """Returns the seed for the order of rows and for their random draws."""
    return int(arguments.seed if arguments.data_seed is None else arguments.data_seed)


def training_steps(rows: int, arguments: TrainingArguments) -> int:
    """Returns the number of updates of a run with this number of rows."""
    order = row_order(rows, arguments)
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    return math.ceil(arguments.num_train_epochs * (len(order) // order.multiple))


def row_order(rows: int, arguments: TrainingArguments) -> EpochOrder:
    """Returns the order in which a run reads its rows."""
    return EpochOrder(
        rows,
        multiple=arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size,
        seed=data_seed(arguments),
        shuffle=arguments.train_sampling_strategy != "sequential",
    )


class _LoadProgress(TrainerCallback):
    """Loads the sums after Trainer has set them to zero."""

    def __init__(self, trainer: SchemeTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.load_progress()
