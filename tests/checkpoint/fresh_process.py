"""Run in a process of its own: loads the checkpoints below a folder and prints what came of it as JSON.

`python fresh_process.py with FOLDER` imports hf_posenc first, `without` never does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def run(model: Any, reference: dict[str, torch.Tensor]) -> float:
    ids = reference["ids"]
    arguments = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False, **arguments)[0]
    expected = reference["bfloat16" if model.dtype == torch.bfloat16 else "outputs"]
    return float((output.float() - expected).abs().max())


def auto_class(architecture: str) -> Any:
    if architecture.endswith("ForMaskedLM"):
        return transformers.AutoModelForMaskedLM
    if architecture.endswith("ForConditionalGeneration"):
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def chosen(folder: Path, routes: dict[str, Callable[[], Any]], *few: str) -> Iterable[str]:
    """All routes for a checkpoint that is there in all forms."""
    return routes if (folder / "sharded").is_dir() else few


def reload(folder: Path) -> dict[str, Any]:
    reference = load_file(folder / "reference" / "reference.safetensors")
    architecture = (folder / "reference" / "architecture").read_text()
    concrete, auto = getattr(transformers, architecture), auto_class(architecture)
    routes: dict[str, Callable[[], Any]] = {
        "auto": lambda: auto.from_pretrained(folder),
        "concrete": lambda: concrete.from_pretrained(folder),
        "sharded": lambda: auto.from_pretrained(folder / "sharded"),
        "subfolder": lambda: auto.from_pretrained(folder.parent, subfolder=folder.name),
        "device_map_cpu": lambda: auto.from_pretrained(folder, device_map={"": "cpu"}),
        "device_map_auto": lambda: auto.from_pretrained(folder, device_map="auto"),
        "low_memory": lambda: auto.from_pretrained(folder, low_cpu_mem_usage=True),
        "float32": lambda: auto.from_pretrained(folder, dtype=torch.float32),
        "state_dict": lambda: auto.from_pretrained(folder / "state_dict"),
        "bfloat16": lambda: auto.from_pretrained(folder, dtype=torch.bfloat16),
    }
    results = {}
    for name in chosen(folder, routes, "auto", "bfloat16"):
        model = routes[name]()
        results[name] = {
            "difference": run(model, reference),
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "is_stock_class": type(model) is concrete,
            "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
            "training": model.training,
        }
    return results


def stock(folder: Path) -> dict[str, Any]:
    """A plain stock checkpoint, loaded where nothing of hf_posenc was ever imported."""
    reference = load_file(folder / "reference" / "reference.safetensors")
    architecture = (folder / "reference" / "architecture").read_text()
    model, info = auto_class(architecture).from_pretrained(folder, output_loading_info=True)
    keys = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]]))
    return {"difference": run(model, reference), "keys": keys, "imported": "hf_posenc" in sys.modules}


def refuse(folder: Path) -> dict[str, str]:
    architecture = (folder / "reference" / "architecture").read_text()
    concrete = getattr(transformers, architecture)
    task = "fill-mask" if architecture.endswith("ForMaskedLM") else "text-generation"
    routes: dict[str, Callable[[], Any]] = {
        "AutoConfig": lambda: transformers.AutoConfig.from_pretrained(folder),
        "AutoModel": lambda: transformers.AutoModel.from_pretrained(folder),
        "AutoModelForX": lambda: auto_class(architecture).from_pretrained(folder),
        "concrete": lambda: concrete.from_pretrained(folder),
        "concrete_sharded": lambda: concrete.from_pretrained(folder / "sharded"),
        "concrete_low_memory": lambda: concrete.from_pretrained(folder, device_map="cpu", dtype=torch.bfloat16),
        "base": lambda: _base_class(concrete).from_pretrained(folder),
        "pipeline": lambda: transformers.pipeline(task, model=str(folder)),
    }
    messages = {}
    for name in chosen(folder, routes, "AutoConfig", "concrete"):
        try:
            routes[name]()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        else:
            messages[name] = "LOADED"
    return messages


def _base_class(concrete: Any) -> Any:
    return transformers.MODEL_MAPPING[concrete.config_class]


if __name__ == "__main__":
    mode, root = sys.argv[1], Path(sys.argv[2])
    folders = sorted(path for path in root.iterdir() if (path / "reference").is_dir())
    if mode == "with":
        import hf_posenc  # noqa: F401
    task = {"with": reload, "without": refuse, "stock": stock}[mode]
    print("RESULTS " + json.dumps({folder.name: task(folder) for folder in folders}))
