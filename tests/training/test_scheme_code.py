"""The digest of the code of a scheme."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from hf_posenc import AlibiConfig, SchemeConfig
from training.checkpoints import scheme_code


@dataclass(frozen=True)
class Here(SchemeConfig):
    """A scheme outside of the library."""


def test_only_schemes_outside_of_the_library_have_a_digest() -> None:
    assert scheme_code(None) == scheme_code(AlibiConfig()) == {}
    assert len(scheme_code(Here())["code of the scheme"]) == 16


def test_a_scheme_of_a_session_without_a_file_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (None, "<stdin>"):
        module = ModuleType("typed")
        module.__file__ = file
        monkeypatch.setitem(sys.modules, "typed", module)
        monkeypatch.setattr(Here, "__module__", "typed")
        assert scheme_code(Here()) == {}
