"""Folders of the models: stock, patched, and healed with the project's own training script."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from tests.kits.everywhere.plan import Variant
from tests.kits.everywhere.steps import Steps, file_name

ROOT = Path(__file__).resolve().parents[3]
#: The settings of training/studies/heal_smollm2.yaml.
HEALING = (
    *("--block_size", "256", "--per_device_train_batch_size", "2", "--learning_rate", "1e-4", "--warmup_steps", "4"),
    *("--weight_decay", "0", "--lr_scheduler_type", "constant_with_warmup", "--max_train_samples", "60"),
    *("--max_eval_samples", "1", "--report_to", "none"),
)


def smollm2(steps: Steps) -> Path:
    """SmolLM2-135M-Instruct as a checkpoint."""
    return steps.folder("smollm2", {}, lambda place: _script("eval/packaged_models.py", "smollm2", "--output", place))


def minilm() -> Path:
    """all-MiniLM-L6-v2, in its package."""
    script = subprocess.run(
        [sys.executable, str(ROOT / "eval" / "packaged_models.py"), "minilm"],
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(script.stdout.strip())


def checkpoint(steps: Steps, base: Path, variant: Variant, *, decoder: bool = True) -> Path:
    """The folder of a variant of the model in `base`: that folder itself, or a patched checkpoint."""
    if not variant.scheme:
        return base

    def make(place: Path) -> None:
        if variant.healing_steps:
            scheme = ("--scheme", variant.scheme, "--scheme_options", json.dumps(dict(variant.options)))
            length = ("--max_steps", str(variant.healing_steps), "--output_dir", place)
            _script("training/run_clm.py", "--model_name_or_path", base, *scheme, *HEALING, *length)
            for state in place.glob("checkpoint-*"):
                shutil.rmtree(state)
            return
        with loaded(base, decoder=decoder) as model:
            hf_posenc.patch_model(model, variant.scheme, **variant.options)
            model.save_pretrained(place)
        AutoTokenizer.from_pretrained(base).save_pretrained(place)

    kind = "smollm2" if decoder else "minilm"
    settings = asdict(variant) | {"healing": HEALING if variant.healing_steps else ()}
    return steps.folder(f"{kind}-{slug(variant)}", settings, make)


def slug(variant: Variant) -> str:
    """The name of a variant for files."""
    return file_name(variant.name)


@contextmanager
def loaded(folder: Path, *, decoder: bool = True) -> Iterator[Any]:
    """A model in float32, for inference. Its memory is free again afterwards."""
    kind = AutoModelForCausalLM if decoder else AutoModel
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    try:
        yield model
    finally:
        del model
        gc.collect()


def _script(path: str, *words: str | Path) -> None:
    subprocess.run([sys.executable, str(ROOT / path), *map(str, words)], check=True, stdout=sys.stderr, cwd=ROOT)
