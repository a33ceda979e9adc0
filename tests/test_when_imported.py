"""Hooks that run when another module is imported."""

import builtins
import importlib
import importlib.util
import sys
import textwrap
import threading
import time

import pytest

from hf_posenc.wrapping import when_imported
from tests.fresh import printed, run_python


@pytest.fixture
def module_file(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("late_module", None)


def test_hooks_run_whenever_the_code_of_the_module_has_run(module_file):
    seen = []
    for hook in ("first", "second"):
        when_imported("late_module", lambda module, hook=hook: seen.append((hook, module.VALUE)))
    # Looking it up does not use the hooks up.
    assert importlib.util.find_spec("late_module") is not None
    assert seen == []
    import late_module

    assert sorted(seen) == [("first", 1), ("second", 1)]
    importlib.reload(late_module)
    assert sorted(seen[2:]) == [("first", 1), ("second", 1)]
    sys.modules.pop("late_module")
    import late_module

    assert sorted(seen[4:]) == [("first", 1), ("second", 1)]


def test_a_module_that_was_loaded_before_is_met_again(module_file):
    import late_module

    seen = []
    when_imported("late_module", lambda module: seen.append(module.VALUE))
    importlib.reload(late_module)
    assert seen == [1, 1]


def test_a_module_that_does_not_exist_still_raises(module_file):
    when_imported("late_module_that_is_absent", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="late_module_that_is_absent"):
        import late_module_that_is_absent  # noqa: F401


def test_importing_the_package_loads_nothing_that_it_may_not_need():
    code = textwrap.dedent("""
        import sys
        import hf_posenc
        assert not {"torch", "transformers", "peft"} & set(sys.modules)
        import transformers.configuration_utils
        assert not {"transformers.modeling_utils", "transformers.trainer", "peft"} & set(sys.modules)
        import transformers.modeling_utils
        late = tuple(f"hf_posenc.{name}" for name in ("patching", "schemes", "recipes", "metrics", "plots"))
        assert not [name for name in sys.modules if name.startswith(late)]
    """)
    printed(run_python("-c", code))


def test_a_module_that_is_being_imported_by_this_thread_cannot_be_followed(tmp_path, monkeypatch):
    (tmp_path / "half_way.py").write_text(
        "from hf_posenc.wrapping import when_imported\nwhen_imported('half_way', print)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="Import hf_posenc before half_way"):
        import half_way  # noqa: F401


def test_a_module_that_another_thread_imports_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import threading\nstarted, go_on = threading.Event(), threading.Event()\n"
        "import builtins\nbuiltins.slow_module_events = started, go_on\ngo_on.wait(30)\nVALUE = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importing = threading.Thread(target=importlib.import_module, args=("slow_module",))
    importing.start()
    while not hasattr(builtins, "slow_module_events"):
        time.sleep(0.01)
    seen = []
    waiting = threading.Thread(target=when_imported, args=("slow_module", lambda module: seen.append(module.VALUE)))
    waiting.start()
    builtins.slow_module_events[1].set()
    importing.join(30)
    waiting.join(30)
    del builtins.slow_module_events
    assert seen == [1]
    sys.modules.pop("slow_module")
