"""What has to be installed, and what more would be measured if it were. Looks for packages without importing them."""

from __future__ import annotations

import importlib.util

#: Without these nothing runs.
_REQUIRED = ("torch", "transformers", "accelerate", "safetensors", "pydantic")

#: What is left out where a package is missing, by the name it is imported by.
_OPTIONAL = {
    "flash_attn": "FlashAttention is neither checked nor timed (pip install flash-attn)",
    "triton": "nothing is compiled for the GPU: FlexAttention, torch.compile and CUDA graphs fail (pip install triton)",
    "pytest": "the test suites are not run on the device (pip install pytest)",
}


def missing_required() -> list[str]:
    """Packages that the kit cannot do without and that are not installed."""
    return [package for package in _REQUIRED if not _installed(package)]


def missing_optional(device: str) -> dict[str, str]:
    """What is left out, by the package whose absence is the reason."""
    only_cuda = ("flash_attn", "triton")
    return {
        package: reason
        for package, reason in _OPTIONAL.items()
        if not _installed(package) and (device == "cuda" or package not in only_cuda)
    }


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
