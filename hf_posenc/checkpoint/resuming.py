"""Checks for resumed training: the model must have the scheme of the checkpoint.

`Trainer` loads weights with `strict=False`, so an unpatched or differently patched model would load them silently.
`install` wraps two methods of `Trainer` when it is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.adapter_config import CONFIG_FILE, names_a_scheme
from hf_posenc.checkpoint.agreement import SchemeMismatchError
from hf_posenc.checkpoint.atomic_folder import finish_saving
from hf_posenc.checkpoint.configuration import from_disk
from hf_posenc.checkpoint.position_files import read_position_files
from hf_posenc.checkpoint.weight_files import named_schemes
from hf_posenc.entry import ATTRIBUTE, is_on_disk_form
from hf_posenc.patching.place.encoding import encodings
from hf_posenc.patching.place.record import disagreement

#: Weight files of a whole model: indices of shards or single files. Adapters are handled separately.
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: Files that FSDP saves in addition, without a mark.
_FSDP_WEIGHTS = "pytorch_model_fsdp.bin"
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
    known, found = _scheme_of(folder)
    if not known:
        return
    step = _step_of(folder)
    for callback in trainer.callback_handler.callbacks:
        if step is not None and hasattr(callback, "match_checkpoint"):
            callback.match_checkpoint(model, step)
    config = next((encoding.config for encoding in encodings(model)), None)
    problem = disagreement(found, config)
    if problem is not None:
        raise SchemeMismatchError(
            f"The checkpoint {folder} does not belong to this {type(model).__name__}: {problem}. Pass Trainer the "
            "model that the training started "
            f"with.{_REMEDY if (folder / CONFIG_FILE).is_file() and found is None else ''}"
        )


def _scheme_of(folder: Path) -> tuple[bool, dict[str, Any] | None]:
    """Returns whether a folder names the scheme of its weights, and the scheme; `None` for stock positions."""
    named = _named_scheme(folder)
    if named is not None:
        return True, named
    whole = any((folder / name).is_file() for name in (*_INDICES, *_WEIGHTS))
    if not whole and (folder / CONFIG_FILE).is_file() and not names_a_scheme(folder, {}):
        return True, None
    adapter_files = None if whole else read_position_files(folder, {})
    if adapter_files is not None:
        return True, adapter_files.scheme
    path = folder / "config.json"
    if not path.is_file():
        return whole or (folder / _FSDP_WEIGHTS).is_file(), None
    config = json.loads(path.read_text(encoding="utf-8"))
    if not is_on_disk_form(config):
        return True, None
    entry = from_disk(config, str(folder))[ATTRIBUTE]
    # Weights without a scheme belong to this config if an older version or FSDP (in shards) saved them.
    return True, None if whole and entry["format"] >= 2 else entry["scheme"]


def _named_scheme(folder: Path) -> dict[str, Any] | None:
    """Returns the scheme named by the weights of a folder."""
    for name in (*_INDICES, *_WEIGHTS, _FSDP_WEIGHTS):
        if (folder / name).is_file():
            return next(iter(named_schemes(folder / name).values()), None)
    return None


def _step_of(folder: Path) -> int | None:
    path = folder / "trainer_state.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["global_step"]) if path.is_file() else None
