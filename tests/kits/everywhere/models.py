"""Folders of the models and of their exports. Each is made once, because that takes most of the time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.export.records import MANIFEST
from hf_posenc.report import Record
from tests.kits.everywhere.plan import Variant

ROOT = Path(__file__).resolve().parents[3]
#: The settings of training/studies/heal_smollm2.yaml.
HEALING = (
    *("--block_size", "256", "--per_device_train_batch_size", "2", "--learning_rate", "1e-4", "--warmup_steps", "4"),
    *("--weight_decay", "0", "--lr_scheduler_type", "constant_with_warmup", "--max_train_samples", "60"),
    *("--max_eval_samples", "1", "--report_to", "none"),
)


#: Targets of `export_model` with their options, by their name in tables.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("stock", {}),
    "gguf, f32": ("gguf", {}),
    "gguf, q8_0": ("gguf", {"dtype": "q8_0"}),
    "onnx": ("onnx", {"quantize": True}),
}
_MADE, _REFUSED = "made.json", "refused.txt"


def made(place: Path, settings: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """A folder, made if it does not exist or was made with other settings.

    Args:
        settings: everything that its content depends on. JSON-ready.
        make: is given the path of the folder, which does not exist.
    """
    wanted, note = json.loads(json.dumps(dict(settings))), place / _MADE
    if not note.is_file() or json.loads(note.read_text())["settings"] != wanted:
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        make(place)
        # Written last, so that an interrupted step starts again.
        note.write_text(json.dumps({"settings": wanted, "seconds": time.monotonic() - started}))
    return place


def smollm2(work: Path) -> Path:
    """SmolLM2-135M-Instruct as a checkpoint."""
    return made(work / "smollm2", {}, lambda place: _script("eval/packaged_models.py", "smollm2", "--output", place))


def minilm() -> Path:
    """all-MiniLM-L6-v2, in its package."""
    command = [sys.executable, str(ROOT / "eval" / "packaged_models.py"), "minilm"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def loaded(folder: Path, model: str) -> Any:
    """A model in float32, for inference."""
    kind = AutoModelForCausalLM if model == "smollm2" else AutoModel
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def checkpoint(work: Path, base: Path, variant: Variant, model: str) -> Path:
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
        hf_posenc.patch_model(loaded(base, model), variant.scheme, **variant.options).save_pretrained(place)
        AutoTokenizer.from_pretrained(base).save_pretrained(place)

    settings = asdict(variant) | {"healing": HEALING if variant.healing_steps else ()}
    return made(work / _file_name(model, variant.name), settings, make)


def export(
    work: Path, machine: Mapping[str, Any], source: Path, variant: Variant, model: str, form: str
) -> tuple[Path | None, Record]:
    """Exports a variant to one of `FORMATS`.

    Returns:
        The folder, or `None` if the export is refused; and a record with the carrier or the reason.
    """
    target, options = FORMATS[form]

    def make(place: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(source)
        try:
            hf_posenc.export_model(loaded(source, model), place, to=target, tokenizer=tokenizer, **options)
        except hf_posenc.UnsupportedError as error:
            place.mkdir()
            (place / _REFUSED).write_text(str(error))

    settings = {"variant": asdict(variant), "format": FORMATS[form], "machine": machine}
    place, at = made(work / _file_name(model, variant.name, form), settings, make), {"model": model, "format": form}
    if (place / _REFUSED).is_file():
        reason = (place / _REFUSED).read_text().splitlines()[0]
        return None, Record(variant.name, "carrier", None, at, note=reason, shown="refused")
    manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    size = sum(path.stat().st_size for path in place.iterdir() if path.suffix in (".gguf", ".onnx", ".safetensors"))
    seconds = round(json.loads((place / _MADE).read_text())["seconds"], 1)
    details = {"seconds": seconds, "bytes": size, "checks": manifest["checks"]}
    return place, Record(variant.name, "carrier", None, at, shown=manifest["carrier"], details=details)


def _file_name(*names: str) -> str:
    return "-".join(names).replace(", ", "-").replace(" ", "-")


def _script(path: str, *words: str | Path) -> None:
    subprocess.run([sys.executable, str(ROOT / path), *map(str, words)], check=True, stdout=sys.stderr, cwd=ROOT)
