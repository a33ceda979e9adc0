"""What the hub may answer, and the card of a model that a run uploads to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError

from hf_posenc.checkpoint import model_card

#: What an upload fails with: refused by the hub, not connected (the hub's HTTP client has errors of its own), or not
#: allowed to connect.
HUB_ERRORS: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)

_TOLD = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "weight_decay", "seed",
)  # fmt: skip


def write_card(trainer: Any, model_id: str) -> None:
    """Writes `README.md` into the output folder of a `SchemeTrainer` whose model has a scheme.

    Args:
        trainer: after training and evaluation.
        model_id: hub id, for the title and the loading example.
    """
    card = model_card(
        trainer.accelerator.unwrap_model(trainer.model), model_id=model_id, sections={"Training": _training(trainer)}
    )
    card.save(Path(trainer.args.output_dir) / "README.md")


def _training(trainer: Any) -> str:
    arguments = trainer.args.to_dict()
    kind = "Causal" if trainer.causal else "Masked"
    lines = [
        f"{kind} language modelling for {trainer.state.global_step} steps on {trainer.args.world_size} process(es)."
    ]
    lines += ["", *(f"- {name}: {arguments[name]}" for name in _TOLD)]
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if evaluated:
        last = evaluated[-1]
        lines += [
            "",
            f"On held-out text: loss {last['eval_loss']:.4f} nats per token, perplexity {last['eval_perplexity']:.2f}.",
        ]
    return "\n".join(lines)
