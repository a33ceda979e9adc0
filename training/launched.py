"""Processes that `accelerate launch` or torchrun started together."""

from __future__ import annotations

import os
import sys

import torch

from training.errors import SettingsError


def is_first_process() -> bool:
    """Whether the launcher counts this process first; where nothing was launched, it is. Holds before they meet."""
    return os.environ.get("RANK", "0") == "0"


def launched_on_cpu() -> bool:
    """Whether this is one of several processes that can only meet on the CPU.

    The launcher keeps `use_cpu` of its config to itself, and without being told, Trainer leaves every process alone.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
    return several and not torch.accelerator.is_available()


def check_met(world_size: int, remedy: str) -> None:
    """Refuses processes that did not form a group.

    Args:
        world_size: number of processes in the group of this one.
        remedy: what to do about it, a sentence.

    Raises:
        SettingsError: if more processes were launched than are in the group.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != world_size:
        raise SettingsError(
            f"{launched} processes were launched and each is alone in its group, so each would train the whole run, "
            f"into the same folder. {remedy}"
        )


def report(program: str, error: object, status: int, every_process: bool = False) -> int:
    """Prints one message; returns `status`.

    Args:
        program: its name, which comes first.
        error: what happened.
        status: of the exit.
        every_process: for what one process alone may have found. What is wrong with the settings is found by every
            process, and told by the first.
    """
    if is_first_process():
        print(f"{program}: {error}", file=sys.stderr)
    elif every_process:
        print(f"{program} (process {os.environ['RANK']}): {error}", file=sys.stderr)
    return status
