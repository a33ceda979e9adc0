"""Features that an older transformers or torch lacks: their tests are skipped only there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

INSTALLED = Version(transformers.__version__)
_PINNED = re.search(r"^transformers==(.+)$", (Path(__file__).parents[1] / "constraints.txt").read_text(), re.MULTILINE)
assert _PINNED is not None
#: The version in which every test has its subject.
TESTED = Version(_PINNED[1])

#: First version and difference of what several tests need.
EXPORTER = ("5.23", "exporters return other programs")
ONE_AXIS = ("5.19", "the rotary module of Qwen-VL's text cannot be called with positions on one axis")


def before(version: str) -> bool:
    """Whether the installed transformers is older."""
    return Version(version) > INSTALLED


def since(version: str, reason: str) -> None:
    """Skips the running test on an older transformers."""
    if before(version):
        pytest.skip(f"before transformers {version}, {reason}")


def torch_since(version: str, reason: str) -> None:
    """Skips the running test on an older torch."""
    if torch.__version__ < version:
        pytest.skip(f"before torch {version}, {reason}")


def must_have(model_type: str, found: bool) -> None:
    """Skips the running test if an older transformers has no such architecture. In others it fails."""
    message = f"transformers {INSTALLED} has no {model_type}"
    if not found and INSTALLED < TESTED:
        pytest.skip(message)
    assert found, message
