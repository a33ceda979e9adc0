"""The exports of every variant, and what carries each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import hf_posenc
from hf_posenc.export.records import MANIFEST
from hf_posenc.report import Record
from tests.kits.everywhere.models import loaded, slug
from tests.kits.everywhere.plan import Variant
from tests.kits.everywhere.steps import Steps, file_name


@dataclass(frozen=True)
class Format:
    """A target of `export_model` with its options.

    Args:
        target: its name.
        options: of the target.
        encoders: whether encoders are exported to it too.
    """

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    encoders: bool = False


#: By name in tables.
FORMATS = {
    "stock": Format("stock"),
    "gguf, f32": Format("gguf"),
    "gguf, q8_0": Format("gguf", {"dtype": "q8_0"}),
    "onnx": Format("onnx", {"quantize": True}, encoders=True),
}
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
    form = FORMATS[name]

    def make(place: Path) -> None:
        with loaded(source, decoder=decoder) as model:
            tokenizer = AutoTokenizer.from_pretrained(source)
            try:
                hf_posenc.export_model(model, place, to=form.target, tokenizer=tokenizer, **form.options)
            except hf_posenc.UnsupportedError as error:
                place.mkdir()
                (place / _REFUSED).write_text(str(error))

    kind = "smollm2" if decoder else "minilm"
    settings = {"variant": asdict(variant), "format": asdict(form), "machine": steps.machine}
    place = steps.folder(f"{kind}-{slug(variant)}-{file_name(name)}", settings, make)
    at = {"model": kind, "format": name}
    if (place / _REFUSED).is_file():
        reason = (place / _REFUSED).read_text().splitlines()[0]
        return None, Record(variant.name, "carrier", None, at, note=reason, shown="refused")
    carrier = manifest(place)["carrier"]
    size = sum(path.stat().st_size for path in place.iterdir() if path.suffix in (".gguf", ".onnx", ".safetensors"))
    details = {"seconds": round(steps.seconds(place), 1), "bytes": size, "checks": manifest(place)["checks"]}
    return place, Record(variant.name, "carrier", None, at, shown=carrier, details=details)


def manifest(place: Path) -> dict[str, Any]:
    """What `export_model` has written about an export."""
    content: dict[str, Any] = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    return content
