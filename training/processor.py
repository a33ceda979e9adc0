"""The name of the processor, for results that say where they were measured."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor_name() -> str:
    """Returns the name of the processor, as far as the system tells it.

    A virtual machine may hide the model: "AMD EPYC" without a number gets the family and model of its cores, which
    tell one generation from another, as in "AMD EPYC (family 25, model 1)".
    """
    information = Path("/proc/cpuinfo")
    name = _from_cpuinfo(information.read_text(encoding="utf-8")) if information.is_file() else None
    return name or platform.processor() or platform.machine()


def _from_cpuinfo(text: str) -> str | None:
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text.split("\n\n")[0], re.MULTILINE))
    name: str | None = fields.get("model name")
    if name and not re.search(r"\d", name) and {"cpu family", "model"} <= fields.keys():
        return f"{name} (family {fields['cpu family']}, model {fields['model']})"
    return name
