"""Wraps functions of other packages, once per process. A copy of this package that is imported later takes over.

A function is wrapped when its module is imported. `import hf_posenc` must not load `peft` or `transformers.trainer`,
which take seconds, but must run code when a program imports them.

Importing this package must not change how the functions are called. A wrapper therefore receives a `Call`, in which it
finds the arguments by the names that the function gives them, however the caller passed them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hf_posenc.errors import UnsupportedError
from hf_posenc.version import with_version

Hook = Callable[[ModuleType], None]
_MARK = "_hf_posenc_wraps"
#: All wrappers by the full names of their functions, also of packages that are not imported.
WRAPPERS: dict[str, Callable[[Call], Any]] = {}


@contextlib.contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Gives a context variable a value in a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Call:
    """A call of a wrapped function. The positional arguments of a method begin with its instance or class."""

    def __init__(
        self, original: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.original, self.signature = original, signature
        self.args, self.kwargs = args, kwargs

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name: all parameters, with their defaults, and additional keywords.

        Raises:
            TypeError: the function's own, for arguments that it does not take.
        """
        bound = self._bound()
        bound.apply_defaults()
        return {**bound.arguments.get(self._keywords, {}), **bound.arguments}

    def __getitem__(self, name: str) -> Any:
        """The argument of a parameter, or its default.

        Raises:
            UnsupportedError: if the function has no parameter of this name in the installed version of its package.
        """
        if name not in self.arguments:
            package = self.original.__module__.partition(".")[0]
            raise UnsupportedError(
                f"{self.original.__qualname__} of {with_version(package)} has no argument {name!r}, which hf_posenc "
                f"reads there. Use a version of {package} that hf_posenc was tested with."
            )
        return self.arguments[name]

    def run(self, /, **changed: Any) -> Any:
        """Calls the function, with other values of some arguments."""
        call = self.changed(**changed) if changed else self
        return call.original(*call.args, **call.kwargs)

    def changed(self, /, **changed: Any) -> Call:
        """The same call with other values of some arguments. Names that are no parameters are additional keywords."""
        bound = self._bound()
        for name, value in changed.items():
            if name in self.signature.parameters:
                bound.arguments[name] = value
            else:
                bound.arguments[self._keywords] = {**bound.arguments.get(self._keywords, {}), name: value}
        return Call(self.original, self.signature, bound.args, bound.kwargs)

    def without(self, *names: str) -> Call:
        """The same call without some keywords."""
        others = {name: value for name, value in self.kwargs.items() if name not in names}
        return Call(self.original, self.signature, self.args, others)

    @property
    def _keywords(self) -> str:
        """The name of the parameter that collects additional keywords; empty if there is none."""
        parameters = self.signature.parameters.values()
        return next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD), "")

    def _bound(self) -> inspect.BoundArguments:
        try:
            return self.signature.bind(*self.args, **self.kwargs)
        except TypeError:
            # Python's own message names the function. This cannot run it, because it has exactly this signature.
            inspect.unwrap(self.original)(*self.args, **self.kwargs)
            raise


def wrap(module: str, wrappers: Mapping[str, Callable[[Call], Any]], *, moved: bool = False) -> None:
    """Replaces functions of a module, as soon as it is imported, by `wrapper(call)`.

    A function is replaced in every module that has imported it by its name. One that is already wrapped stays as it is.

    Args:
        module: full name of the module.
        wrappers: by the name of the function in the module, or of a method: "function", "Class.method".
        moved: whether other versions of the package have the functions in another place. Those that do not exist are
            left out.

    Raises:
        ImportError: from the import of the module, if it lacks a function.
    """
    WRAPPERS.update({f"{module}.{name}": wrapper for name, wrapper in wrappers.items()})

    def place(loaded: ModuleType) -> None:
        for name, wrapper in wrappers.items():
            try:
                _place(loaded, name, wrapper)
            except AttributeError as error:
                if not moved:
                    raise ImportError(
                        f"hf_posenc wraps {module}.{name}, which {with_version(module.partition('.')[0])} does not "
                        "have. Use a version that hf_posenc was tested with."
                    ) from error

    when_imported(module, place)


def _place(module: ModuleType, path: str, wrapper: Callable[[Call], Any]) -> None:
    class_name, _, name = path.rpartition(".")
    owner: Any = getattr(module, class_name) if class_name else module
    raw = inspect.getattr_static(owner, name)
    kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    original = replaced = raw if kind is None else raw.__func__
    if _is_of_another_copy(original):
        original = getattr(original, _MARK)
    named = _named(original, name) or original
    if hasattr(original, _MARK) or hasattr(named, _MARK):
        return
    signature = inspect.signature(named)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(Call(original, signature, args, kwargs))

    # `inspect.getfullargspec` reads the signature, and does not unwrap. Pickle reads the module and the name.
    wrapped.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    wrapped.__module__, wrapped.__qualname__ = module.__name__, path
    for attribute in dir(original):  # for example those of `functools.lru_cache`
        if not hasattr(wrapped, attribute):
            setattr(wrapped, attribute, getattr(original, attribute))
    setattr(wrapped, _MARK, original)
    setattr(owner, name, wrapped if kind is None else kind(wrapped))
    if owner is module:
        for other in list(sys.modules.values()):
            # getattr is not used, because lazy packages import submodules on attribute access.
            if getattr(other, "__dict__", {}).get(name) is replaced:
                setattr(other, name, wrapped)


def _named(function: Any, name: str, before: tuple[Any, ...] = ()) -> Any:
    """Returns the function of this name that another package's function with `(self, *args, **kwargs)` calls."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if kinds[-2:] != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] or len(kinds) > 3:
        return function if function.__name__ == name else None
    called = inspect.getclosurevars(inspect.unwrap(function))
    values = [getattr(value, "__func__", value) for value in (*called.nonlocals.values(), *called.globals.values())]
    others = [value for value in values if inspect.isfunction(value) and value not in (*before, function)]
    return next(filter(None, (_named(other, name, (*before, function)) for other in others)), None)


def _is_of_another_copy(function: Any) -> bool:
    """Whether a function is a wrapper created by an earlier import of this module."""
    module = getattr(function, "__globals__", {})
    return hasattr(function, _MARK) and module.get("__name__") == __name__ and module is not globals()


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
