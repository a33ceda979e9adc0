"""Measuring without leaving a trace: modes and random state are given back as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode it was in, one by one."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Draws from `seed`; afterwards the random state of the CPU and of every CUDA device in use is as before."""
    # An uninitialised CUDA has no state to keep, and must not be initialised by a measurement.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.random.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
