"""Runs a function when another package is imported, without importing it.

`import hf_posenc` must not load `peft` or `transformers.trainer`, which take seconds, but must run code when a program
imports them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Calls `hook(module)` once: immediately if the module is loaded, otherwise right after its first import.

    Args:
        name: full name of the module, such as "peft.peft_model".
        hook: called with the module after its code has run. Its exceptions propagate to the import statement.

    Raises:
        ImportError: if the module is being imported by the current call stack, so that the hook cannot run after it.
    """
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, hook))
        return
    # Waits if another thread is importing it.
    module = importlib.import_module(name)
    if getattr(module.__spec__, "_initializing", False):
        raise ImportError(
            f"{__package__} was first imported during the import of {name}. Import {__package__} before {name}."
        )
    hook(module)


class _Finder:
    """Finds one module with the other finders and adds the hook to its loader."""

    def __init__(self, name: str, hook: Hook) -> None:
        self.name, self.hook = name, hook
        self._delegating = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self._delegating:
            return None
        self._delegating = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._delegating = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # A spec may be looked up without an import (`importlib.util.find_spec`), so the finder stays until now.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.hook(module)

        # Each module has its own loader for source files, so this does not affect other modules.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
