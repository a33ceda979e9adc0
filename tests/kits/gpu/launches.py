"""The second part: how many kernels a scheme launches, which compute attention, and where it waits for the device.

All are counted, not timed, so the load of the machine does not matter. A wait is what
`torch.cuda.set_sync_debug_mode` reports: the host reads a value that the device has to compute first. The models are in
bfloat16, because there is no flash kernel for float32.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

import hf_posenc
from benchmarks.subjects import STOCK
from hf_posenc import get_scheme, list_schemes
from tests.kits.gpu.cells import Part
from tests.kits.gpu.models import DECODER, ENCODER, build, tokens
from tests.kits.gpu.rows import OK, WRONG, Row

#: What is counted, for a decoder and for an encoder.
_PHASES = {DECODER: ("forward", "padded", "train", "token"), ENCODER: ("forward", "padded", "train")}
_PADS = 7
#: The operators by which torch calls the kernels of `scaled_dot_product_attention`.
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "cpu",
    "aten::_scaled_dot_product_attention_math": "math",
}
_LIBRARY = Path(hf_posenc.__file__).parent


class Launches(Part):
    """Kernels and waits of every scheme, and those of the stock model."""

    @property
    def _length(self) -> int:
        return 24 if self.smoke else 160

    def settings(self) -> dict[str, Any]:
        """What all rows depend on."""
        return {"length": self._length, "dtype": "bfloat16"}

    def cells(self) -> list[str]:
        """Phase, kind of model and scheme; for each phase the stock model first."""
        schemes = [name for name in list_schemes() if not get_scheme(name).combinator]
        if self.smoke:
            schemes = ["none", "alibi"]
        return [
            f"{phase} {kind} {scheme}"
            for kind, phases in _PHASES.items()
            for scheme in (STOCK, *schemes)
            for phase in phases
        ]

    def run(self, cell: str) -> Row:
        """Counts one cell; wrong is what waits in more places than the stock model."""
        phase, kind, scheme = cell.split(" ")
        model = build(kind, scheme).to(self.device, torch.bfloat16)
        model.set_attn_implementation("sdpa")
        call = self._call(model, phase, kind)
        # Whatever is made once is there, and checked, after the first calls.
        call()
        call()
        waits = waits_on_cuda(call) if self.device == "cuda" else Counter()
        ours = {place: count for place, count in waits.items() if place.startswith(f"{_LIBRARY.name}/")}
        row: Row = {"status": OK, "kernels": _kernels(call, self.device), "attention": attention_kernels(call)}
        row |= {"waits": sum(waits.values()), "ours": ours}
        return row | ({"status": WRONG, "reason": f"waits in {', '.join(sorted(ours))}"} if ours else {})

    def _call(self, model: Any, phase: str, kind: str) -> Callable[[], object]:
        ids = tokens(self._length).to(self.device)
        uncached = {"use_cache": False} if kind == DECODER else {}
        if phase == "train":
            model.train()
            return lambda: model(input_ids=ids, labels=ids, **uncached).loss.backward()
        if phase == "token":
            cache = DynamicCache(config=model.config)
            torch.no_grad()(model)(input_ids=ids, past_key_values=cache, use_cache=True)
            return torch.no_grad()(lambda: model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True))
        masked = {}
        if phase == "padded":
            masked["attention_mask"] = torch.ones_like(ids)
            masked["attention_mask"][0, :_PADS] = 0
        return torch.no_grad()(lambda: model(input_ids=ids, **uncached, **masked))


def waits_on_cuda(call: Callable[[], object]) -> Counter[str]:
    """How often one call waits for the device, by the place in Python."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True, action="always") as caught:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    return Counter(f"{_short(Path(warning.filename))}:{warning.lineno}" for warning in waits)


def _short(file: Path) -> str:
    """The path from the package on, for files of this library and of others."""
    root = _LIBRARY.parent if file.is_relative_to(_LIBRARY) else Path(*file.parts[:-3])
    return file.relative_to(root).as_posix()


def _kernels(call: Callable[[], object], device: str) -> int:
    """How many kernels and copies one call starts; on a CPU, how many operators it calls."""
    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        call()
        if cuda:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    return sum(event.device_type == wanted for event in recorded.events())


def attention_kernels(call: Callable[[], object]) -> dict[str, int]:
    """How often one call takes each kernel of `scaled_dot_product_attention`."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call()
    return dict(Counter(_ATTENTION[event.name] for event in recorded.events() if event.name in _ATTENTION))
