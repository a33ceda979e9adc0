"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hf_posenc

REPOSITORY = Path(__file__).parents[2]


def test_every_public_name_exists_and_is_documented() -> None:
    for name in hf_posenc.__all__:
        value = getattr(hf_posenc, name)
        assert name == "__version__" or value.__doc__, name
    assert set(hf_posenc.__all__) <= set(dir(hf_posenc))
    with pytest.raises(AttributeError, match="no attribute 'patch_modle'"):
        _ = hf_posenc.patch_modle


def test_type_checkers_see_the_same_names() -> None:
    source = (REPOSITORY / "hf_posenc" / "__init__.py").read_text()
    typed = source.split("if TYPE_CHECKING:")[1].split("__all__ = [")[0]
    for name in hf_posenc.__all__:
        assert name == "__version__" or f"{name}," in typed or typed.count(f" {name}\n") or f" {name}," in typed, name


def test_import_is_cheap() -> None:
    code = (
        "import transformers.modeling_utils, sys, time; start = time.perf_counter(); import hf_posenc; "
        "print(time.perf_counter() - start, *(name for name in sys.modules if name.startswith('hf_posenc.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    seconds, *modules = done.stdout.split()
    assert float(seconds) < 0.1
    assert not [name for name in modules if name.startswith(("hf_posenc.patching", "hf_posenc.schemes"))]
