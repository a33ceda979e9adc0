"""A device with CUDA's rules in the memory of the CPU, so that what a GPU would refuse, or wait for, shows without one.

`load` builds `strict_device.cpp` and registers it as the device `strict`, of which there are two. That holds for the
whole process, and torch then takes it for the accelerator of the machine, so only processes of their own load it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchgen
import yaml

#: How an operator of CUDA treats tensors on different devices. The numbers are those of `strict_device.cpp`.
_SAME_DEVICE, _CPU_SCALARS, _UNCHECKED, _NO_KERNEL = range(4)
NAME = "strict"
_DEVICES = 2
_SOURCE = Path(__file__).with_suffix(".cpp")
#: The extension, in a process that has loaded it.
loaded: types.ModuleType | None = None


def missing() -> str | None:
    """Why it cannot be built here, or None."""
    absent = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"the strict device is built with {' and '.join(absent)}, which are not installed" if absent else None


def rules() -> dict[str, int]:
    """What `native_functions.yaml`, from which torch generates its kernels for CUDA, says of each operator."""
    file = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    text = file.read_text(encoding="utf-8")
    # What a check of devices is left to stands in a comment.
    text = re.sub(r"device_check: NoCheck\s*#.*TensorIterator.*", "device_check: Iterator", text)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    functions = {one["func"].split("(")[0]: one for one in yaml.load(text, loader)}
    return {f"aten::{name}": _rule(one, functions) for name, one in functions.items()}


def _rule(function: dict[str, Any], functions: dict[str, dict[str, Any]]) -> int:
    keys = {key.strip() for names in function.get("dispatch", {}) for key in names.split(",")}
    delegate = functions.get(function.get("structured_delegate", ""))
    if delegate is not None:
        keys |= {key.strip() for names in delegate["dispatch"] for key in names.split(",")}
    # The kernels of a "ufunc" are generated for both devices.
    generated = any("ufunc_inner_loop" in one for one in (function, delegate or {}))
    if keys and "CUDA" not in keys and not generated and not any(key.startswith("Composite") for key in keys):
        return _NO_KERNEL
    return {"NoCheck": _UNCHECKED, "Iterator": _CPU_SCALARS}.get(function.get("device_check", ""), _SAME_DEVICE)


def load() -> types.ModuleType:
    """Builds the extension, or takes the one that was built, and registers the device."""
    from torch.utils import cpp_extension

    global loaded
    torch.utils.rename_privateuse1_backend(NAME)
    # One for each torch, because it is kept for later processes.
    name = re.sub(r"\W", "_", f"strict_device_{torch.__version__}")
    lock = Path(cpp_extension._get_build_directory(name, False), "lock")
    # Torch waits for this file for ever. After ten minutes, its build was killed.
    if lock.exists() and time.time() - lock.stat().st_mtime > 600:
        lock.unlink(missing_ok=True)
    built: types.ModuleType = cpp_extension.load(name, [str(_SOURCE)], extra_cflags=["-O1", "-std=c++20"])
    built.register_hooks()
    built.set_rules(rules())
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        device_count=lambda: _DEVICES,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        current_device=built.current_device,
        set_device=lambda device: built.set_device(
            torch.device(NAME, device).index if isinstance(device, int) else torch.device(device).index or 0
        ),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        manual_seed=lambda seed: built.default_generator(built.current_device()).manual_seed(seed),
        manual_seed_all=lambda seed: [built.default_generator(index).manual_seed(seed) for index in range(_DEVICES)],
        get_rng_state=lambda device=0: torch.get_rng_state(),
        set_rng_state=lambda state, device=0: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    loaded = built
    return built


@contextlib.contextmanager
def listened(built: types.ModuleType) -> Iterator[dict[str, Counter[str]]]:
    """What the device does inside: "launch" counts operators, "wait" the places where the host waits, file and line."""
    seen: dict[str, Counter[str]] = {"launch": Counter(), "wait": Counter()}

    def hear(kind: str, what: str) -> None:
        if kind == "launch":
            seen[kind][what] += 1
            return
        frame = sys._getframe(1) if sys._getframe(0).f_back else None
        while frame is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "outside Python"
        seen[kind][f"{place} {what}"] += 1

    built.listen(hear)
    try:
        yield seen
    finally:
        built.listen(None)
