"""Where a benchmark ran: the description that makes figures comparable, and how much memory a process takes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import hf_posenc
from benchmarks.errors import BenchmarkError
from training.processor import processor_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
#: Of the memory that is free, this much is left to the rest of the machine.
_RESERVE_BYTES = 1 << 30


def check_device(device: str) -> None:
    """Says what is missing where a device is not there.

    Raises:
        BenchmarkError: if torch has no such device here.
    """
    if device == "cuda" and not torch.cuda.is_available():
        why = (
            "this build of torch is for the CPU only; install one with CUDA"
            if torch.version.cuda is None
            else "torch was built with CUDA but finds no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
        raise BenchmarkError(f"The device 'cuda' is not there: {why}, or use --device cpu.")


def describe_machine(device: str) -> dict[str, Any]:
    """Everything that figures depend on beside the settings, and nothing that changes from day to day."""
    described: dict[str, Any] = {
        "cpu": processor_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_gb": _total_memory_gb(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "x-transformers": _version_or_none("x-transformers"),
        "hf-posenc": hf_posenc.__version__,
        "hf-posenc source": source_digest(),
    }
    if device == "cuda":
        described |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return described


def source_digest() -> str:
    """Twelve hexadecimal digits that change with any line of the library's code."""
    root = Path(hf_posenc.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def synchronize(device: str) -> None:
    """Waits for what a GPU still has to do; a CPU has done it already."""
    if device == "cuda":
        torch.cuda.synchronize()


def resident_bytes(device: str) -> int:
    """What the process holds now: allocated memory on a GPU, resident memory otherwise."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    if _STATUS.is_file():
        return _status_bytes("VmRSS")
    return _highest_ever()


def reset_peak(device: str) -> None:
    """Lets `peak_bytes` count from now on, where the system can; elsewhere it counts from the start of the process."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif _STATUS.is_file():
        with contextlib.suppress(PermissionError):
            _RESET_PEAK.write_text("5")


def peak_bytes(device: str) -> int:
    """The most the process has held since `reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if _STATUS.is_file():
        return _status_bytes("VmHWM")
    return _highest_ever()


@contextlib.contextmanager
def within_free_memory(device: str) -> Iterator[None]:
    """Within it, an allocation that this machine has no memory for is an error of torch instead of a killed process.

    On Linux only. CUDA raises by itself.
    """
    if device == "cuda" or not _STATUS.is_file():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _status_bytes("VmData") + max(_available_bytes() - _RESERVE_BYTES, 0)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise BenchmarkError(f"{_STATUS} has no line {field!r}, so this system does not tell how much memory is taken.")
    return int(found[1]) * 1024


def _highest_ever() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _available_bytes() -> int:
    """What the machine has free, or the control group of a container if that is less."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    available = int(found[1]) * 1024 if found else _total_bytes()
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        available = min(available, int(most) - int(used.read_text()))
    return available


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _total_memory_gb() -> int | None:
    return round(_total_bytes() / 1e9) if hasattr(os, "sysconf") else None


def _version_or_none(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
