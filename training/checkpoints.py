"""Complete checkpoints to resume from, and a record of the settings and the code of a run."""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_posenc.metrics.evaluation import digest
from hf_posenc.schemes.config import SchemeConfig, walk
from training.errors import SettingsError
from training.files import read_json, write_json

logger = logging.getLogger(__name__)

#: File in the output folder with the settings that the run began with.
SETTINGS_FILE = "run_settings.json"
#: File in a checkpoint with the sizes of its files, and the sums that a resumed run continues. It is written after the
#: files of all processes. Only `_STATE` is written later.
PROGRESS_FILE = "progress.json"
_STATE = "trainer_state.json"

#: Training arguments for where, how often and how a run writes. They have no effect on what it computes.
_WITHOUT_EFFECT = re.compile(
    r"output_dir|logging_.*|log_.*|disable_tqdm|report_to|run_name|project|trackio_.*|include_num_input_tokens_seen"
    r"|eval_.*|per_device_eval_batch_size|save_.*|push_to_hub|hub_.*|resume_from_checkpoint|do_train|do_eval"
    r"|do_predict|dataloader_(?!drop_last).*|ddp_(?:timeout|bucket_cap_mb|backend)|local_rank|skip_memory_metrics"
    r"|debug|include_for_metrics|label_names|remove_unused_columns|enable_jit_checkpoint|torch_empty_cache_steps"
    r"|length_column_name|restore_callback_states_from_checkpoint|deepspeed_plugin"
)
#: Arguments that determine which checkpoint is the best one, and so the final model.
_CHOOSE_BEST = (
    "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "save_strategy", "save_steps",
    "metric_for_best_model", "greater_is_better",
)  # fmt: skip


def incompleteness(checkpoint: Path, world_size: int) -> str | None:
    """Says why a checkpoint cannot be resumed from; `None` if it is complete.

    If a process is killed while saving, files are missing or cut off.
    """
    if not checkpoint.is_dir():
        return "the folder does not exist"
    for name in (PROGRESS_FILE, _STATE):
        try:
            content = json.loads((checkpoint / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return f"{name} is missing"
        except ValueError:
            return f"{name} is cut off"
        if not isinstance(content, dict) or (name == PROGRESS_FILE and "since_log" not in content):
            return f"{name} was changed"
        for file, size in content.get("files", {}).items():
            if not (checkpoint / file).is_file():
                return f"{file} is missing"
            if (checkpoint / file).stat().st_size != size:
                return f"{file} is cut off"
        if name == PROGRESS_FILE and len(content["since_log"]) != world_size:
            return f"it was written by {len(content['since_log'])} process(es), not by {world_size}"
    return None


def stored_names(checkpoint: Path) -> set[str]:
    """Returns the names of all weights in a checkpoint; none if it has adapters or shards of FSDP."""
    index, single = checkpoint / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_NAME
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not single.is_file():
        return set()
    with safe_open(single, framework="pt") as weights:
        return set(weights.keys())


def record_progress(checkpoint: Path, progress: Mapping[str, Any]) -> None:
    """Writes the file that lists the files of a checkpoint, after all of them except the trainer's state."""
    files = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()
    }
    write_json(checkpoint / PROGRESS_FILE, {"files": files, **progress})


def latest_complete_checkpoint(output_dir: str | Path, world_size: int = 1) -> Path | None:
    """Returns the last checkpoint that can be resumed from, or `None`. Warns about each one that it skips."""
    by_step = {
        int(match[1]): path
        for path in Path(output_dir).glob("*")
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name))
    }
    for _, path in sorted(by_step.items(), reverse=True):
        problem = incompleteness(path, world_size)
        if problem is None:
            return path
        logger.warning("Skipping %s, which cannot be resumed from: %s.", path, problem)
    return None


def checkpoint_settings(arguments: TrainingArguments, **others: Any) -> dict[str, Any]:
    """Returns the settings that must stay the same for a resumed run to continue the same curve, JSON-ready.

    The frequency of logs, evaluations, saves and reports may change. That of evaluations must not change if they choose
    the model (`load_best_model_at_end`).
    """
    chooses = _CHOOSE_BEST if arguments.load_best_model_at_end else ()
    settings = {
        name: value
        for name, value in arguments.to_dict().items()
        if name in chooses or not _WITHOUT_EFFECT.fullmatch(name)
    }
    settings["world_size"] = arguments.world_size
    asked = "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else "no"
    if arguments.mixed_precision != asked:  # set by `accelerate launch`
        settings["mixed_precision"] = arguments.mixed_precision
    return json.loads(json.dumps(settings | others, default=str))


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns one phrase for each setting that changed."""
    return [
        f"{name} was {earlier.get(name, 'absent')!r} and is now {now.get(name, 'absent')!r}"
        for name in sorted({*earlier, *now})
        if earlier.get(name, "absent") != now.get(name, "absent")
    ]


def check_folder(folder: Path, begun: bool, missing: str) -> None:
    """Raises `SettingsError` for an output folder with other files, which has not `begun` and lacks something."""
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"--output_dir {folder} is a file; a folder is expected.")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() and not begun else []
    if names := [name for name in names if not name.startswith(".")]:
        raise SettingsError(
            f"{folder} is not empty ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}), and {missing}. Choose "
            "another --output_dir."
        )


def check_run(output_dir: str | Path, settings: Mapping[str, Any]) -> bool:
    """Whether the output folder contains an earlier part of this run. Writes nothing."""
    folder = Path(output_dir)
    earlier = None if folder.is_file() else read_json(folder / SETTINGS_FILE)
    check_folder(folder, earlier is not None, f"has no run of this script: {SETTINGS_FILE} is missing")
    if earlier is None:
        return False
    changed = differences(earlier, settings)
    if changed:
        raise SettingsError(
            f"{folder} contains a run with other settings: {'; '.join(changed)}. Its curve would mix both settings. "
            "Restore the earlier settings to resume, choose another --output_dir, or start again with "
            "--overwrite_output_dir."
        )
    return True


def scheme_code(config: SchemeConfig | None) -> dict[str, str]:
    """Returns a setting: a digest of the modules that define a scheme and the schemes inside it.

    Comments and formatting do not change the digest. It covers the modules of the configs, but not the modules that
    they import.

    Returns:
        16 hexadecimal digits by their name; nothing if the modules are all part of hf_posenc or have no source file.
    """
    modules = {type(inside).__module__ for inside in ([] if config is None else walk(config))}
    outside = [module for module in modules if module.partition(".")[0] != "hf_posenc"]
    files = {getattr(sys.modules[module], "__file__", None) for module in outside}
    sources = sorted(file for file in files if file and file.endswith(".py") and Path(file).is_file())
    code = [ast.dump(ast.parse(Path(file).read_bytes())) for file in sources]
    return {"code of the scheme": digest("\n".join(code))} if code else {}
