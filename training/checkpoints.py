"""Checkpoints that can be resumed from, and the settings that a run began with."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from training.errors import SettingsError
from training.files import read_json, write_json

logger = logging.getLogger(__name__)

#: In the output folder: what the run began with.
SETTINGS_FILE = "run_settings.json"

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_STATE = "trainer_state.json"
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"

#: Training arguments that say where, how often and how visibly a run writes, and nothing about what it computes.
_WITHOUT_EFFECT = re.compile(
    r"output_dir|logging_.*|log_.*|disable_tqdm|report_to|run_name|project|trackio_.*|include_num_input_tokens_seen"
    r"|eval_.*|per_device_eval_batch_size|save_.*|push_to_hub|hub_.*|resume_from_checkpoint|do_train|do_eval"
    r"|do_predict|dataloader_(?!drop_last).*|ddp_(?:timeout|bucket_cap_mb|backend)|local_rank|skip_memory_metrics"
    r"|debug|include_for_metrics|label_names|remove_unused_columns|enable_jit_checkpoint|torch_empty_cache_steps"
    r"|length_column_name|restore_callback_states_from_checkpoint|deepspeed_plugin"
)
#: Those that decide which checkpoint is the best one, and so which model the run ends with.
_CHOOSE_BEST = (
    "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "save_strategy", "save_steps",
    "metric_for_best_model", "greater_is_better",
)  # fmt: skip


def incompleteness(checkpoint: Path, world_size: int) -> str | None:
    """What a checkpoint lacks to be resumed from, in words; `None` if it is complete.

    Every file that a resumed run reads has to be there and whole: a process that was killed while it saved leaves
    some of them out, or one of them cut off.

    Args:
        checkpoint: the folder `checkpoint-STEP`.
        world_size: number of processes; each has random number states of its own.
    """
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        state = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{_STATE} is missing"
    except (json.JSONDecodeError, UnicodeDecodeError):
        return f"{_STATE} is cut off"
    match = _NAME.fullmatch(checkpoint.name)
    if match and state.get("global_step") != int(match[1]):
        return f"{_STATE} is that of step {state.get('global_step')}"
    ranks = ["rng_state.pth"] if world_size <= 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    sharded = [folder for folder in checkpoint.glob("optimizer_*") if folder.is_dir()]
    optimizer = [] if sharded or (checkpoint / "optimizer.bin").exists() else ["optimizer.pt"]
    for name in ("scheduler.pt", *ranks, *optimizer):
        # torch.save writes a zip archive, whose table of contents comes last.
        if not zipfile.is_zipfile(checkpoint / name):
            return f"{name} is {'cut off' if (checkpoint / name).exists() else 'missing'}"
    for folder in (*sharded, *checkpoint.glob("pytorch_model_fsdp_*/")):
        if not (folder / ".metadata").exists():
            return f"{folder.name}/.metadata is missing"
    return _weights_problem(checkpoint)


def _weights_problem(checkpoint: Path) -> str | None:
    if any(checkpoint.glob("pytorch_model_fsdp_*/")) or (checkpoint / "pytorch_model_fsdp.bin").exists():
        return None
    names = [name for name in _WEIGHTS if (checkpoint / name).exists()]
    if (checkpoint / _INDEX).exists():
        try:
            names = sorted(set(json.loads((checkpoint / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, KeyError):
            return f"{_INDEX} is cut off"
    if not names:
        return f"the weights ({' or '.join(_WEIGHTS)}) are missing"
    for name in names:
        try:
            with safe_open(checkpoint / name, framework="pt") as weights:
                weights.keys()
        except FileNotFoundError:
            return f"{name} is missing"
        except (SafetensorError, OSError):
            return f"{name} is cut off"
    return None


def latest_complete_checkpoint(output_dir: str | Path, world_size: int = 1) -> Path | None:
    """The checkpoint with the highest step that can be resumed from; warns about each one it passes over.

    Args:
        output_dir: where a `Trainer` wrote `checkpoint-STEP` folders.
        world_size: number of processes of the run that resumes.

    Returns:
        Its folder, or `None` where there is none.
    """
    folders = [(int(match[1]), path) for path in Path(output_dir).glob("*") if (match := _NAME.fullmatch(path.name))]
    for _, path in sorted(folders, reverse=True):
        problem = incompleteness(path, world_size)
        if problem is None:
            return path
        logger.warning("Passing over %s, which cannot be resumed from: %s.", path, problem)
    return None


def checkpoint_settings(arguments: TrainingArguments, **others: Any) -> dict[str, Any]:
    """The settings that must stay the same for a resumed run to continue the same curve, JSON-ready.

    How often a run logs, evaluates, saves and reports may change; evaluation may not where it chooses the model
    (`load_best_model_at_end`).

    Args:
        arguments: of the Trainer; the number of processes is recorded with them.
        **others: what else decides the curve, by name: digests of data and of initial weights, a scheme's options.
            A dataclass or mapping stands for one setting per field.
    """
    chooses = _CHOOSE_BEST if arguments.load_best_model_at_end else ()
    settings = {
        name: value
        for name, value in arguments.to_dict().items()
        if name in chooses or not _WITHOUT_EFFECT.fullmatch(name)
    }
    settings["world_size"] = arguments.world_size
    asked = "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else "no"
    if arguments.mixed_precision != asked:  # asked for by `accelerate launch`
        settings["mixed_precision"] = arguments.mixed_precision
    for name, value in others.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            settings |= dataclasses.asdict(value)
        elif isinstance(value, Mapping):
            settings |= {f"{name}.{key}": entry for key, entry in value.items()}
        else:
            settings[name] = value
    return json.loads(json.dumps(settings, default=str))


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One phrase for each setting that is not what it was."""
    absent = "absent"
    return [
        f"{name} was {earlier.get(name, absent)!r} and is now {now.get(name, absent)!r}"
        for name in sorted({*earlier, *now})
        if earlier.get(name, absent) != now.get(name, absent)
    ]


def check_run(output_dir: str | Path, settings: Mapping[str, Any]) -> bool:
    """Whether this run was begun in the output folder before; writes nothing.

    Raises:
        SettingsError: if the folder holds a run with other settings, or files of something else.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"--output_dir {folder} is a file; a folder is expected.")
    earlier = read_json(folder / SETTINGS_FILE)
    if earlier is None:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        if found:
            raise SettingsError(
                f"{folder} is not empty ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''}), and what is in it "
                f"is no run of this script: it has no {SETTINGS_FILE}. Name another --output_dir."
            )
        return False
    changed = differences(earlier, settings)
    if changed:
        raise SettingsError(
            f"{folder} holds a run that began with other settings: {'; '.join(changed)}. Going on would give a curve "
            "that is neither run's. Go back to the earlier settings to resume, name another --output_dir, or start "
            "anew with --overwrite_output_dir."
        )
    return True


def record_run(output_dir: str | Path, settings: Mapping[str, Any]) -> None:
    """Writes what a new run begins with."""
    write_json(Path(output_dir) / SETTINGS_FILE, dict(settings))
