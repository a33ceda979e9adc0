"""How far a call travels through the library. import-linter checks the imports (pyproject.toml).

The numbers are counted, not timed, so they do not depend on the machine. They are upper bounds of what is there: lower
them after a change that shortens a path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hf_posenc
from tests.models import tiny

PACKAGE = Path(hf_posenc.__file__).parent
IDS = torch.arange(1, 17).unsqueeze(0)


def count(action: Callable[[], Any]) -> tuple[int, int]:
    """The files and the calls of the library while `action` runs."""
    files: set[str] = set()
    calls = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{PACKAGE}/") and not frame.f_code.co_name.startswith("<"):
            files.add(name)
            calls += 1

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(before)
    return len(files), calls


@pytest.mark.parametrize(
    ("action", "most_files", "most_calls"),
    [
        (lambda model: lambda: hf_posenc.patch_model(model, "alibi"), 63, 3130),
        (lambda model: lambda: hf_posenc.patch_model(model, "alibi")(IDS, use_cache=False), 75, 3800),
    ],
    ids=["patch", "patch and first forward"],
)
@torch.no_grad()
def test_a_patch_takes_no_longer_way(action: Any, most_files: int, most_calls: int) -> None:
    hf_posenc.patch_model(tiny("LlamaForCausalLM"), "alibi")  # imports what is imported late
    files, calls = count(action(tiny("LlamaForCausalLM")))
    assert files <= most_files
    assert calls <= most_calls


@torch.no_grad()
def test_a_forward_takes_no_longer_way() -> None:
    model = hf_posenc.patch_model(tiny("LlamaForCausalLM").eval(), "alibi")
    model(IDS, use_cache=False)
    files, calls = count(lambda: model(IDS, use_cache=False))
    assert files <= 29
    assert calls <= 215


def test_the_library_is_no_larger() -> None:
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")]
    assert sum(lines) <= 50_300
    assert max(lines) <= 500
    assert len(lines) <= 480
