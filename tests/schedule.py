"""Which tests a run has, and how the workers of pytest-xdist share them: whole files or folders, longest first."""

from __future__ import annotations

from typing import Any

import pytest

#: Folders whose files share what takes long to make: the documentation site.
SHARING = ("tests/documentation",)
#: Files and such folders that take longest, the longest first, so that no worker is idle at the end.
LONGEST = (
    "tests/training/test_compare.py",
    "tests/matrix/test_behaviour.py",
    "tests/test_notebooks.py",
    "tests/documentation",
    "tests/explorer/test_page.py",
    "tests/training/test_run_processes.py",
    "tests/explorer/test_formulas.py",
    "tests/explorer/test_comparison.py",
    "tests/export/test_onnx.py",
    "tests/test_examples.py",
    "tests/distributed/test_tensor_parallel.py",
    "tests/patching/test_ecosystem.py",
    "tests/training/test_run_clm.py",
    "tests/training/test_run_hub.py",
    "tests/training/test_healing.py",
    "tests/integrations/test_tools.py",
    "tests/real/test_pretrained.py",
    "tests/schemes/test_all_schemes.py",
    "tests/training/test_trainer.py",
    "tests/benchmarks/test_price.py",
    "tests/patching/test_given_positions.py",
    "tests/recipes/test_gradual.py",
    "tests/kits/test_gpu.py",
    "tests/training/test_study_of_ones_own.py",
    "tests/training/test_launched.py",
    "tests/attention/test_compiled.py",
    "tests/distributed/test_sharded.py",
    "tests/metrics/test_properties.py",
    "tests/hostile/test_damaged_files.py",
    "tests/matrix/test_reload.py",
    "tests/checkpoint/test_reload.py",
    "tests/test_lm_eval.py",
    "tests/architectures/test_architectures.py",
)
_RANK = {path: rank for rank, path in enumerate(LONGEST)}


def leaves_long_tests_out(config: pytest.Config) -> bool:
    """Whether a run is of the whole suite without `-m`, `-k` and `--long`. Named tests are always run."""
    root = config.rootpath
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    chosen = config.getoption("markexpr") != "not slow" or config.getoption("keyword") or config.getoption("long")
    return not chosen and bool(named & {root, root / "tests"})


def whole(nodeid: str) -> str:
    """The file of a test, or its folder if its files share something: one worker runs all of it."""
    path = nodeid.split("::")[0]
    folder = path.rpartition("/")[0]
    return folder if folder in SHARING else path


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts the tests of a run in place; those of all other files keep their order."""
    items.sort(key=lambda item: _RANK.get(whole(item.nodeid), len(LONGEST)))


def whole_files(config: pytest.Config, log: Any) -> Any:
    """The scheduler of a run with `-n`: what the tests of a file or folder share is made once, by one worker."""
    from xdist.scheduler import LoadFileScheduling

    class WholeFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return whole(nodeid)

    # It would begin with the files of most tests.
    config.option.loadscopereorder = False
    return WholeFiles(config, log)
