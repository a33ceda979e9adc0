"""Run in a separate process without hf_posenc: loads checkpoints below a folder and prints what came of it as JSON.

`python fresh_process.py without FOLDER` loads patched checkpoints, `stock` those of exports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, load_model

Routes = dict[str, Callable[[], Any]]


def run(model: Any, reference: dict[str, torch.Tensor]) -> float:
    ids = reference["ids"]
    arguments = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False, **arguments)[0]
    expected = reference["bfloat16" if model.dtype == torch.bfloat16 else "outputs"]
    return float((output.float() - expected).abs().max())


def classes(folder: Path) -> tuple[Any, Any]:
    """The class of the saved model, and the auto class of its task."""
    architecture = (folder / "reference" / "architecture").read_text()
    tasks = {"ForMaskedLM": "ForMaskedLM", "ForConditionalGeneration": "ForSeq2SeqLM"}
    task = next((auto for ending, auto in tasks.items() if architecture.endswith(ending)), "ForCausalLM")
    return getattr(transformers, architecture), getattr(transformers, f"AutoModel{task}")


def stated(model: Any) -> int | None:
    """The length in the config."""
    fields = vars(model.config)
    return fields.get("max_position_embeddings", fields.get("n_positions"))


def stock(folder: Path) -> dict[str, Any]:
    """A plain stock checkpoint, loaded where nothing of hf_posenc was ever imported."""
    reference = load_file(folder / "reference" / "reference.safetensors")
    model, info = classes(folder)[1].from_pretrained(folder, output_loading_info=True)
    keys = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]]))
    return {"difference": run(model, reference), "keys": keys, "imported": "hf_posenc" in sys.modules}


def refuse(folder: Path) -> dict[str, str]:
    concrete, auto = classes(folder)
    routes: Routes = {
        "AutoConfig": lambda: transformers.AutoConfig.from_pretrained(folder),
        "concrete": lambda: concrete.from_pretrained(folder),
        "config class": lambda: concrete.from_pretrained(folder, config=concrete.config_class.from_pretrained(folder)),
    }
    if (folder / "sharded").is_dir():
        base_class = transformers.MODEL_MAPPING[concrete.config_class]
        task = "fill-mask" if concrete.__name__.endswith("ForMaskedLM") else "text-generation"
        routes |= {
            "AutoModel": lambda: transformers.AutoModel.from_pretrained(folder),
            "AutoModelForX": lambda: auto.from_pretrained(folder, trust_remote_code=True),
            "concrete_sharded": lambda: concrete.from_pretrained(folder / "sharded"),
            "concrete_low_memory": lambda: concrete.from_pretrained(folder, device_map="cpu", dtype=torch.bfloat16),
            "base": lambda: base_class.from_pretrained(folder),
            "config by hand": lambda: auto.from_pretrained(folder / "by_hand"),
            "concrete, config by hand": lambda: concrete.from_pretrained(folder / "by_hand"),
            "pipeline": lambda: transformers.pipeline(task, model=str(folder)),
            "pipeline without a task": lambda: transformers.pipeline(model=str(folder)),
        }
    if (folder / "tokenizer.json").is_file():
        routes["AutoTokenizer"] = lambda: transformers.AutoTokenizer.from_pretrained(folder)
        routes["AutoProcessor"] = lambda: transformers.AutoProcessor.from_pretrained(folder)
    if (folder / "adapter").is_dir():
        routes |= tools(folder, concrete, auto)
    messages = {}
    for name, load in routes.items():
        try:
            load()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        else:
            messages[name] = "LOADED"
    assert "hf_posenc" not in sys.modules
    return messages


def tools(folder: Path, concrete: Any, auto: Any) -> Routes:
    """Other libraries, and adapters."""
    import peft
    import sentence_transformers
    from transformers.cli.serving.model_manager import ModelManager

    adapter, weights = folder / "adapter", str(folder / "model.safetensors")
    config = concrete.config_class.from_dict(json.loads((folder / "config.json").read_text()))
    base = folder.parent / "stock"
    return {
        "config of a class": lambda: concrete.from_pretrained(folder, config=config),
        "load_state_dict": lambda: concrete(config).load_state_dict(load_file(weights)),
        "safetensors": lambda: load_model(concrete(config), weights),
        "transformers serve": lambda: ModelManager(device="cpu").load_model_and_processor(f"{folder}@main"),
        "SentenceTransformer": lambda: sentence_transformers.SentenceTransformer(str(folder)),
        "CrossEncoder": lambda: sentence_transformers.CrossEncoder(str(folder)),
        "PeftConfig": lambda: peft.PeftConfig.from_pretrained(adapter),
        "PeftModel": lambda: peft.PeftModel.from_pretrained(auto.from_pretrained(base), adapter),
        "AutoPeftModel": lambda: peft.AutoPeftModelForCausalLM.from_pretrained(adapter),
        "adapter, AutoModel": lambda: auto.from_pretrained(adapter),
        "adapter, class": lambda: concrete.from_pretrained(adapter),
        "adapter, load_adapter": lambda: auto.from_pretrained(base).load_adapter(adapter),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    mode, root = sys.argv[1], Path(sys.argv[2])
    folders = sorted(path for path in root.iterdir() if (path / "reference").is_dir())
    task = {"without": refuse, "stock": stock}[mode]
    print("RESULTS " + json.dumps({folder.name: task(folder) for folder in folders}))
