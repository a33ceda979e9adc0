"""How the workers of pytest-xdist share the tests: whole files, the longest first."""

from __future__ import annotations

from typing import Any

import pytest

#: Files that take longest, the longest first. One of them begun last would leave the other workers idle.
LONGEST = (
    "tests/patching/test_ecosystem.py",
    "tests/matrix/test_behaviour.py",
    "tests/tools/test_tools.py",
    "tests/training/test_compare.py",
    "tests/checkpoint/test_other_loaders.py",
)
_RANK = {path: rank for rank, path in enumerate(LONGEST)}


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts the tests of a run in place; those of all other files keep their order."""
    items.sort(key=lambda item: _RANK.get(item.nodeid.split("::")[0], len(LONGEST)))


def whole_files(config: pytest.Config, log: Any) -> Any:
    """The scheduler of a run with `-n`: a file belongs to one worker, so what its tests share is made once."""
    from xdist.scheduler import LoadFileScheduling

    # It would begin with the files of most tests.
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)
