"""Hooks that run when another module is imported."""

import importlib.util
import subprocess
import sys
import textwrap

import pytest

from hf_posenc.when_imported import when_imported


@pytest.fixture
def module_file(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("late_module", None)


def test_a_hook_runs_once_after_the_code_of_the_module(module_file):
    seen = []
    finders = list(sys.meta_path)
    when_imported("late_module", lambda module: seen.append(module.VALUE))
    assert seen == []
    import late_module

    assert seen == [1]
    assert sys.meta_path == finders
    sys.modules.pop("late_module")
    import late_module  # noqa: F401, F811

    assert seen == [1]


def test_two_hooks_of_one_module_both_run(module_file):
    seen = []
    when_imported("late_module", lambda _: seen.append("first"))
    when_imported("late_module", lambda _: seen.append("second"))
    import late_module  # noqa: F401

    assert sorted(seen) == ["first", "second"]


def test_looking_a_module_up_does_not_use_the_hook_up(module_file):
    seen = []
    when_imported("late_module", seen.append)
    assert importlib.util.find_spec("late_module") is not None
    assert seen == []
    import late_module

    assert seen == [late_module]


def test_a_loaded_module_is_met_at_once():
    seen = []
    when_imported("json", seen.append)
    assert seen == [sys.modules["json"]]


def test_a_module_that_does_not_exist_still_raises(module_file):
    when_imported("late_module_that_is_absent", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="late_module_that_is_absent"):
        import late_module_that_is_absent  # noqa: F401


def test_importing_the_package_loads_neither_peft_nor_the_trainer():
    code = textwrap.dedent("""
        import sys
        import hf_posenc
        assert "peft" not in sys.modules
        assert "transformers.trainer" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", code], check=True)
