"""The order in which a run takes the files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.schedule import LONGEST, SHARING, longest_first, whole

ROOT = Path(__file__).resolve().parent.parent


def test_the_files_it_names_exist() -> None:
    assert [path for path in LONGEST if path not in SHARING and not (ROOT / path).is_file()] == []
    assert [path for path in SHARING if not (ROOT / path).is_dir()] == []


def test_long_files_come_first_and_all_others_stay_in_their_order() -> None:
    names = ["tests/b.py::one", "tests/a.py::one[x::y]", f"{LONGEST[1]}::Class::two", f"{LONGEST[0]}::one"]
    items = [SimpleNamespace(nodeid=name) for name in [*names, f"{LONGEST[1]}::one"]]
    longest_first(items)  # type: ignore[arg-type]
    found = [item.nodeid for item in items]
    assert found == [names[3], names[2], f"{LONGEST[1]}::one", names[0], names[1]]


def test_the_files_of_a_folder_that_shares_something_are_one() -> None:
    (folder, *_) = SHARING
    assert whole(f"{folder}/a.py::one[x::y]") == whole(f"{folder}/b.py::Class::two") == folder
    assert whole("tests/matrix/a.py::one[x/y]") == "tests/matrix/a.py"
    assert whole(f"{folder}_more/a.py::one") == f"{folder}_more/a.py"
    items = [SimpleNamespace(nodeid=f"tests/{name}.py::one") for name in ("a", "documentation/b", "c")]
    longest_first(items)
    assert items[0].nodeid == "tests/documentation/b.py::one"
