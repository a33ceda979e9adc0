"""What a processor is called, for results that say where they were measured."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The name of the processor, as far as the system tells it.

    A virtual machine may hide the model: "AMD EPYC" without a number is said with family and model of its cores, which
    tell one generation from another, as in "AMD EPYC (family 25, model 1)".
    """
    information = Path("/proc/cpuinfo")
    if not information.is_file():
        return platform.processor() or platform.machine()
    return _from_cpuinfo(information.read_text(encoding="utf-8")) or platform.processor() or platform.machine()


def _from_cpuinfo(text: str) -> str | None:
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        field, _, value = line.partition(":")
        fields[field.strip()] = value.strip()
    name = fields.get("model name")
    if name is None or any(character.isdigit() for character in name):
        return name
    if "cpu family" not in fields or "model" not in fields:
        return name
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"
