"""How far a call travels through the library, and how large it is. import-linter checks the imports (pyproject.toml).

The numbers are counted, not timed, so they do not depend on the machine. They are upper bounds of what is there: lower
them after a change that shortens a path.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hf_posenc
from tests.fresh import run_fresh

PACKAGE = Path(hf_posenc.__file__).parent
#: The most files and calls.
BOUNDS = {"patch": (60, 1205), "patch and first forward": (71, 1475), "forward": (28, 190)}
#: In a process of its own, because what other tests have registered is examined by a patch too.
COUNT = """
import json, sys
from pathlib import Path

import torch

import hf_posenc
from tests.models import tiny

package = f"{Path(hf_posenc.__file__).parent}/"
ids = torch.arange(1, 17).unsqueeze(0)


def count(action):
    files, calls = set(), 0

    def watch(frame, event, argument):
        nonlocal calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(package) and not frame.f_code.co_name.startswith("<"):
            files.add(name)
            calls += 1

    sys.setprofile(watch)
    action()
    sys.setprofile(None)
    return len(files), calls


def patched():
    return hf_posenc.patch_model(tiny("LlamaForCausalLM").eval(), "alibi")


with torch.no_grad():
    patched()(ids, use_cache=False)  # imports what is imported late
    stock = [tiny("LlamaForCausalLM").eval() for _ in range(2)]
    found = {
        "patch": count(lambda: hf_posenc.patch_model(stock[0], "alibi")),
        "patch and first forward": count(lambda: hf_posenc.patch_model(stock[1], "alibi")(ids, use_cache=False)),
        "forward": count(lambda: stock[1](ids, use_cache=False)),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def counted() -> dict[str, list[int]]:
    done = run_fresh(COUNT)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("path", BOUNDS)
def test_a_call_takes_no_longer_way(counted: dict[str, list[int]], path: str) -> None:
    files, calls = counted[path]
    most_files, most_calls = BOUNDS[path]
    assert files <= most_files
    assert calls <= most_calls


def test_the_library_is_no_larger() -> None:
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")]
    assert sum(lines) <= 50_700
    assert max(lines) <= 500
    assert len(lines) <= 345
