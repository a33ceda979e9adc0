"""Runs a function when another package is imported, without importing it.

`import hf_posenc` must not load `peft` or `transformers.trainer`, which take seconds, but must run code when a program
imports them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Calls `hook(module)` whenever the code of a module has run, and at once if the module is loaded.

    The code runs again if the module is reloaded, or imported after its removal from `sys.modules`.

    Args:
        name: full name of the module, such as "peft.peft_model".
        hook: called with the module. Its exceptions propagate to the import statement.

    Raises:
        ImportError: if the module is being imported by the current call stack, so that the hook cannot run after it.
    """
    if name in sys.modules:
        # Waits if another thread is importing it.
        module = importlib.import_module(name)
        if getattr(module.__spec__, "_initializing", False):
            raise ImportError(
                f"{__package__} was first imported during the import of {name}. Import {__package__} before {name}."
            )
        hook(module)
    _FINDER.hooks.setdefault(name, []).append(hook)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder:
    """Finds modules with the other finders and adds the hooks to their loaders."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._delegating: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.hooks or fullname in self._delegating:
            return None
        self._delegating.add(fullname)
        try:
            finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        finally:
            self._delegating.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for hook in self.hooks[fullname]:
                hook(module)

        # Each module has its own loader for source files, so this does not affect other modules.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()
