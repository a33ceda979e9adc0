"""Fixed numbers of a part that must not be module state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DeviceConstant:
    """A fixed tensor, with one copy per device, that module casts and meta-device loading cannot reach.

    A buffer would be rounded by `module.to(torch.bfloat16)` and left uninitialised by meta-device loading: bfloat16
    frequencies are wrong by whole turns after a few hundred positions.

    Args:
        values: the constant on the CPU.
    """

    def __init__(self, values: Tensor) -> None:
        self._copies: dict[torch.device, Tensor] = {torch.device("cpu"): values}

    def on(self, device: torch.device) -> Tensor:
        """The constant on `device`, copied there once."""
        copy = self._copies.get(device)
        if copy is None:
            copy = self._copies[torch.device("cpu")].to(device)
            # A tensor made while tracing must not outlive the trace.
            if not torch.compiler.is_compiling():
                self._copies[device] = copy
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"_copies": {torch.device("cpu"): self._copies[torch.device("cpu")]}}
