"""A description of the machine of a benchmark, which makes figures comparable, and the memory of a process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import sys
import timeit
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import hf_posenc
from benchmarks.errors import BenchmarkError
from training.machine import processor_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Free memory that is left to the rest of the machine.
_RESERVE_BYTES = 1 << 30
#: Above this ratio, schemes with decaying biases are slower than on other processors.
SLOW_SUBNORMALS = 3.0


def check_device(device: str) -> None:
    """Raises if a device does not exist, and says what is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        why = (
            "this build of torch only supports the CPU; install one with CUDA"
            if torch.version.cuda is None
            else "torch was built with CUDA but finds no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
        raise BenchmarkError(f"The device 'cuda' is not available: {why}, or use --device cpu.")


def describe_machine(device: str) -> dict[str, Any]:
    """Returns everything that figures depend on besides the settings, and nothing that changes from day to day."""
    described: dict[str, Any] = {
        "cpu": processor_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "x-transformers": _version_or_none("x-transformers"),
        "hf-posenc": hf_posenc.__version__,
        "hf-posenc source": _source_digest(),
    }
    if device == "cuda":
        described |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return described


def machine_line(machine: dict[str, Any]) -> str:
    """Returns the processor, the GPU if there is one, and the versions."""
    processor = f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    place = f"{machine['gpu']} (CUDA {machine['cuda']}) with {processor}" if "gpu" in machine else processor
    return (
        f"{place}; Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"hf-posenc {machine['hf-posenc']} (source `{machine['hf-posenc source']}`)"
    )


def subnormal_ratio() -> float:
    """Returns the time for subnormal float32 numbers as a multiple of the time for normal ones.

    It is the larger ratio of a multiplication and a matrix product, each the fastest of 15 runs. In attention, these
    operators process `exp` of a large negative logit. A matrix of 192 rows stays in the caches of any processor.
    """
    half, normal, subnormal, out = (torch.full((192, 192), value) for value in (0.5, 0.25, 1e-40, 0.0))

    def fastest(operator: Any, numbers: torch.Tensor) -> float:
        return min(timeit.repeat(lambda: operator(numbers, half, out=out), number=1, repeat=15))

    return max(fastest(function, subnormal) / fastest(function, normal) for function in (torch.mul, torch.mm))


def subnormal_line(ratio: float) -> str:
    """Returns one sentence for a table, and a warning if the ratio is large."""
    line = f"Subnormal float32 numbers take {ratio:.1f} times as long as normal ones on this processor."
    if ratio <= SLOW_SUBNORMALS:
        return line
    return f"**{line} Biases that decay produce such numbers and are slower here.** Name the processor with any figure."


def synchronize(device: str) -> None:
    """Waits for a GPU to finish."""
    if device == "cuda":
        torch.cuda.synchronize()


def resident_bytes(device: str) -> int:
    """Returns the current memory of the process: allocated memory on a GPU, resident memory otherwise."""
    return torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss


def reset_peak(device: str) -> None:
    """Makes `peak_bytes` count from now on if the system permits it, otherwise from the start of the process."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """Returns the maximum memory of the process since `reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform != "linux":
        raise BenchmarkError("The peak memory of a process on the CPU can only be measured on Linux.")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[0]) * 1024


@contextlib.contextmanager
def within_free_memory(device: str) -> Iterator[None]:
    """Within this context, an allocation that does not fit into memory raises an error, and the process is not killed.

    It only works on Linux. CUDA raises an error itself.
    """
    if device == "cuda" or sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + max(_available_bytes() - _RESERVE_BYTES, 0)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _available_bytes() -> int:
    """Returns the free memory of the machine, or of a container's control group if that is less."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        available = min(available, int(most) - int(used.read_text()))
    return available


def _source_digest() -> str:
    """Returns twelve hexadecimal digits that change with any line of the library's code."""
    root = Path(hf_posenc.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version_or_none(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
