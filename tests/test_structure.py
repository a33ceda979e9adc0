"""How many files a patch passes through. import-linter checks the imports (pyproject.toml)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hf_posenc
from tests.models import tiny

PACKAGE = Path(hf_posenc.__file__).parent


def files_that_receive(model: Any, action: Callable[[], Any]) -> set[str]:
    """Files of the package in which a function gets the model as an argument while `action` runs."""
    found = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(frame.f_locals.get(name) is model for name in names):
                found.add(str(Path(code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_patch_model_passes_its_model_through_at_most_thirteen_files(name: str) -> None:
    model = tiny(name)
    found = files_that_receive(model, lambda: hf_posenc.patch_model(model, "alibi"))
    assert "patching/patch.py" in found
    assert len(found) <= 13, sorted(found)
