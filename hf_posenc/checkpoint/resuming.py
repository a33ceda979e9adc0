"""Checks for resumed training: the model must have the scheme of the checkpoint.

`Trainer` loads weights with `strict=False`, so an unpatched or differently patched model would load them silently.
`install` wraps two methods of `Trainer` when it is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.adapter_config import CONFIG_FILE
from hf_posenc.checkpoint.atomic_folder import finish_saving
from hf_posenc.checkpoint.stored_weights import schemes_of_checkpoint

_REMEDY = (
    " If its adapter was trained with the scheme, and saved by a version of hf_posenc before adapters named it, load "
    "it with PeftModel.from_pretrained(patched_model, checkpoint), and save it there again with save_pretrained."
)


def check_checkpoint(trainer: Any, folder: str | Path, model: Any = None) -> None:
    """Compares the scheme of a checkpoint with the scheme of the model that it will be loaded into.

    A callback that changes the scheme during training has a method `match_checkpoint(model, step)`. It is called first,
    and patches the model with the scheme it had after that number of steps.

    Args:
        trainer: the `Trainer`.
        folder: folder of the checkpoint.
        model: the model that `Trainer` loads it into; `None` for its own model.

    Raises:
        SchemeMismatchError: if they differ, before anything is loaded; names both schemes.
    """
    model, folder = trainer.model if model is None else model, Path(folder)
    finish_saving(folder)
    named, state = schemes_of_checkpoint(folder), folder / "trainer_state.json"
    if named is None:
        return
    if state.is_file():
        step = int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
        for callback in trainer.callback_handler.callbacks:
            if hasattr(callback, "match_checkpoint"):
                callback.match_checkpoint(model, step)
    adapter = (folder / CONFIG_FILE).is_file() and not named.schemes
    named.check(model, f" Pass Trainer the model that the training started with.{_REMEDY if adapter else ''}")
