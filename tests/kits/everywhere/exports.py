"""The exports of every variant, and what carries each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import hf_posenc
from hf_posenc.export.records import MANIFEST
from hf_posenc.report import Record
from tests.kits.everywhere.models import loaded, slug
from tests.kits.everywhere.plan import Variant
from tests.kits.everywhere.steps import Steps, file_name

#: Targets of `export_model` with their options, by their name in tables.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("stock", {}),
    "gguf, f32": ("gguf", {}),
    "gguf, q8_0": ("gguf", {"dtype": "q8_0"}),
    "onnx": ("onnx", {"quantize": True}),
}
#: Those that encoders are exported to.
OF_ENCODERS = ("onnx",)
_REFUSED = "refused.txt"


def export(
    steps: Steps, source: Path, variant: Variant, name: str, *, decoder: bool = True
) -> tuple[Path | None, Record]:
    """Exports a variant.

    Args:
        steps: the work so far.
        source: its checkpoint.
        variant: which it is.
        name: one of `FORMATS`.
        decoder: whether it generates.

    Returns:
        The folder, or `None` if the export is refused; and a record with the carrier or the reason.
    """
    target, options = FORMATS[name]

    def make(place: Path) -> None:
        with loaded(source, decoder=decoder) as model:
            tokenizer = AutoTokenizer.from_pretrained(source)
            try:
                hf_posenc.export_model(model, place, to=target, tokenizer=tokenizer, **options)
            except hf_posenc.UnsupportedError as error:
                place.mkdir()
                (place / _REFUSED).write_text(str(error))

    kind = "smollm2" if decoder else "minilm"
    settings = {"variant": asdict(variant), "format": FORMATS[name], "machine": steps.machine}
    place = steps.folder(f"{kind}-{slug(variant)}-{file_name(name)}", settings, make)
    at = {"model": kind, "format": name}
    if (place / _REFUSED).is_file():
        reason = (place / _REFUSED).read_text().splitlines()[0]
        return None, Record(variant.name, "carrier", None, at, note=reason, shown="refused")
    manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    size = sum(path.stat().st_size for path in place.iterdir() if path.suffix in (".gguf", ".onnx", ".safetensors"))
    details = {"seconds": round(steps.seconds(place), 1), "bytes": size, "checks": manifest["checks"]}
    return place, Record(variant.name, "carrier", None, at, shown=manifest["carrier"], details=details)
