"""The machine of a run, and the processes that `accelerate launch` or torchrun started on it."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import torch

from training.errors import SettingsError


def is_first_process() -> bool:
    """Whether this is the first launched process, or the only one. It works before the processes form a group."""
    return os.environ.get("RANK", "0") == "0"


def launched_on_cpu() -> bool:
    """Whether this is one of several processes that can only form a group on the CPU.

    The launcher does not pass on `use_cpu` of its config, and without it Trainer does not connect the processes.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
    return several and not torch.accelerator.is_available()


def check_met(world_size: int, remedy: str) -> None:
    """Raises `SettingsError` if launched processes did not form a group. `remedy` says what to do about it."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != world_size:
        raise SettingsError(
            f"{launched} processes were launched, but they did not form a group, so each would train the whole run, "
            f"into the same folder. {remedy}"
        )


def report(program: str, error: object, status: int, every_process: bool = False) -> int:
    """Prints the message of the first process only, or of each if it may concern just one. Returns `status`."""
    if is_first_process():
        print(f"{program}: {error}", file=sys.stderr)
    elif every_process:
        print(f"{program} (process {os.environ['RANK']}): {error}", file=sys.stderr)
    return status


def usable_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Returns the name of the processor, as far as the system provides it.

    A virtual machine may hide the model number. A name without one, such as "AMD EPYC", is followed by the family and
    model of its cores, which identify the generation: "AMD EPYC (family 25, model 1)".
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
