"""Every step, in order, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_posenc.report import Record, Result, Subject
from tests.kits.everywhere import text
from tests.kits.everywhere.decoders import Task, reference, run_everywhere
from tests.kits.everywhere.encoders import run_encoder
from tests.kits.everywhere.exports import FORMATS, OF_ENCODERS, export
from tests.kits.everywhere.models import HEALING, checkpoint
from tests.kits.everywhere.page import QUANTITIES
from tests.kits.everywhere.plan import Plan, Variant
from tests.kits.everywhere.steps import Steps
from tests.kits.everywhere.timings import run_timings

_PACKAGES = ("torch", "transformers", "onnxruntime", "xllamacpp", "gguf")


def measure(plan: Plan, steps: Steps, bases: Mapping[str, Path], command: str) -> Result:
    """Makes the models and exports that are missing, and measures.

    Args:
        plan: what is measured.
        steps: the work so far.
        bases: the checkpoints of the stock models, "smollm2" and "minilm".
        command: the command line, for the page.
    """
    records: list[Record] = []
    exports: dict[str, dict[str, Path | None]] = {}
    sources: dict[str, Path] = {}

    def decode(variant: Variant, length: int | None = None) -> None:
        task = Task.of(plan, sources[variant.name], length)
        expected, of_reference = reference(sources[variant.name], variant, task)
        records.extend(of_reference + run_everywhere(variant, exports[variant.name], expected))

    for variant in plan.decoders:
        source = sources[variant.name] = checkpoint(steps, bases["smollm2"], variant)
        exports[variant.name] = {}
        for name in FORMATS:
            exports[variant.name][name], record = export(steps, source, variant, name)
            records.append(record)
        decode(variant)
    for variant in plan.encoders:
        source = checkpoint(steps, bases["minilm"], variant, decoder=False)
        for name in OF_ENCODERS:
            place, record = export(steps, source, variant, name, decoder=False)
            records.append(record)
            if place is not None:
                records += run_encoder(source, variant, place, plan)
    for name, lengths in plan.long.items():
        for length in lengths:
            decode(plan.decoder(name), length)
    records += run_timings(exports, text.speech_tokens(bases["smollm2"]), plan)
    return _result(plan, steps, records, command)


def _result(plan: Plan, steps: Steps, records: list[Record], command: str) -> Result:
    labels = dict.fromkeys(
        [named.name for named in (*plan.decoders, *plan.encoders)] + [named.subject for named in records]
    )
    schemes = {named.name: named.scheme or "native" for named in (*plan.encoders, *plan.decoders)}
    settings: dict[str, Any] = {
        "command": command,
        "machine": steps.machine,
        "versions": {name: version(name) for name in _PACKAGES},
        "plan": asdict(plan),
        "healing": list(HEALING),
        "text": text.SPEECH,
    }
    return Result(
        task="everywhere",
        title="",
        quantities=QUANTITIES,
        subjects=tuple(Subject(label, schemes.get(label, "native")) for label in labels),
        records=tuple(records),
        views=(),
        settings=settings,
    )
