"""What a processor is called, for results that say where they were measured."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The name of the processor, as far as the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
