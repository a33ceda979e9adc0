"""The length of call paths through the library, and its size. import-linter checks the imports (pyproject.toml).

The numbers are counted, not timed, so they do not depend on the machine. They are upper bounds of what is there: lower
them after a change that shortens a path.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import hf_posenc
from tests.fresh import run_fresh

PACKAGE = Path(hf_posenc.__file__).parent
#: The most files, calls and changes of file.
BOUNDS = {
    "patch": (30, 1192, 525),
    "patch and first forward": (37, 1386, 615),
    "forward": (14, 102, 58),
    "further layer": (14, 21, 13),
    "decoding": (13, 127, 64),
    "save": (13, 270, 57),
    "from_pretrained": (33, 1181, 517),
}
#: In a process of its own, because what other tests have registered is examined by a patch too.
COUNT = """
import json, sys, tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import hf_posenc
from tests.models import tiny

package = f"{Path(hf_posenc.__file__).parent}/"
ids = torch.arange(1, 17).unsqueeze(0)


def count(action):
    files = []

    def watch(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(package) and not frame.f_code.co_name.startswith(("<", "find_spec")):
            files.append(name)

    sys.setprofile(watch)
    action()
    sys.setprofile(None)
    return len({*files}), len(files), sum(one != next for one, next in zip(files, files[1:]))


def patched(layers=2):
    return hf_posenc.patch_model(tiny("LlamaForCausalLM", num_hidden_layers=layers).eval(), "alibi")


with torch.no_grad():
    patched()(ids, use_cache=False)  # imports what is imported late
    stock = [tiny("LlamaForCausalLM").eval() for _ in range(2)]
    found = {
        "patch": count(lambda: hf_posenc.patch_model(stock[0], "alibi")),
        "patch and first forward": count(lambda: hf_posenc.patch_model(stock[1], "alibi")(ids, use_cache=False)),
        "forward": count(lambda: stock[1](ids, use_cache=False)),
    }
    deep = patched(3)
    deep(ids, use_cache=False)
    files, *others = count(lambda: deep(ids, use_cache=False))
    found["further layer"] = files, *(more - fewer for more, fewer in zip(others, found["forward"][1:]))
    cache = stock[1](ids).past_key_values
    stock[1](ids[:, :1], past_key_values=cache)
    found["decoding"] = count(lambda: stock[1](ids[:, :1], past_key_values=cache))
    folder = tempfile.mkdtemp()
    # The first save of a process. Calls of find_spec, one per import, depend on the installed packages: not counted.
    found["save"] = count(lambda: stock[1].save_pretrained(folder))
    found["from_pretrained"] = count(lambda: AutoModelForCausalLM.from_pretrained(folder))
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
    assert all(number <= most for number, most in zip(counted[path], BOUNDS[path], strict=True)), counted[path]


def lines_of(folder: Path) -> list[int]:
    return [len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py")]


def test_the_library_is_no_larger() -> None:
    lines = lines_of(PACKAGE)
    assert sum(lines) <= 56_097
    assert max(lines) <= 500
    assert len(lines) <= 300


@pytest.mark.parametrize(
    ("room", "most"), [("training", 7_049), ("eval", 322), ("benchmarks", 2_496), ("tests", 59_029)]
)
def test_the_rooms_around_the_library_are_no_larger(room: str, most: int) -> None:
    lines = lines_of(PACKAGE.parent / room)
    assert sum(lines) <= most
    assert max(lines) <= 500


def test_names_of_the_product_say_what_they_hold() -> None:
    for room in (PACKAGE, *(PACKAGE.parent / name for name in ("training", "eval", "benchmarks"))):
        for path in room.rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            names = {getattr(node, field, "") for node in nodes for field in ("id", "arg", "attr", "name")}
            assert not names & {"found", "one", "own"}, path
