"""Reading the code of a forward: its names, parameters and wrappers; copying it with other globals; unknown code."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.errors import UnsupportedError

#: The global name of transformers' attention interface in modeling modules.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: Depth to which a wrapper is searched for the forward inside it.
_DEEPEST_WRAPPER = 6
#: Packages whose decorators and attention functions are those of stock models.
_OWN_PACKAGES = ("transformers", "torch", "accelerate", "peft", "hf_posenc")


def is_of_transformers(module_name: str) -> bool:
    """Whether a Python module belongs to transformers, or to a package that it is made of."""
    return module_name.split(".")[0] in _OWN_PACKAGES


def rotary_names(forward: types.FunctionType) -> list[str]:
    """Names of the rotary functions that a forward calls."""
    names = forward.__code__.co_names
    return [name for name in names if "apply_rotary" in name and callable(forward.__globals__.get(name))]


def relative_names(forward: types.FunctionType) -> list[str]:
    """Names of the functions `(module, query, key, ...) -> (query, bias)` that a forward calls for a relative bias."""
    names = forward.__code__.co_names
    return [name for name in names if name.startswith("_apply_relative") and callable(forward.__globals__.get(name))]


def names_used(forward: Any) -> frozenset[str]:
    """All names, variables and strings in the code of a forward."""
    return names_in(inspect.unwrap(forward).__code__)


@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names, variables and strings in a code object, and in those inside it."""
    names: set[str] = set()
    pending: list[Any] = [code]
    while pending:
        constant = pending.pop()
        if isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, tuple):
            pending.extend(constant)
        elif isinstance(constant, types.CodeType):
            pending.extend((*constant.co_names, *constant.co_varnames, *constant.co_consts))
    return frozenset(names)


def forward_parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class's forward. One that takes any arguments passes them on to that of a class below it."""
    for one in kind.__mro__:
        # Not from the class's dictionary, which a compiled forward cannot read if the class was changed.
        found = parameters_of(one.forward) if hasattr(one, "forward") else {}
        if any(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in list(found.values())[1:]):
            return found
    return parameters_of(kind.forward)


@functools.lru_cache(maxsize=1024)
def parameters_of(forward: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a method."""
    return inspect.signature(forward).parameters


def named_arguments(stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call of a module by name."""
    if not args:
        return kwargs
    return dict(zip([*forward_parameters(type(stack))][1:], args, strict=False)) | kwargs


def rebind(function: types.FunctionType, replaced: Mapping[str, Any]) -> types.FunctionType:
    """The same code object with a copy of its globals in which `replaced` overrides some names."""
    namespace = function.__globals__ | dict(replaced)
    # With `__name__`, dynamo would take the copy for the module itself and guard the globals of the module.
    namespace.pop("__name__", None)
    rebound = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound


def in_decorators(decorated: Any, rebound: types.FunctionType) -> types.FunctionType:
    """Puts a copy of the innermost function into copies of its decorators, some of which rename arguments."""
    inner = getattr(decorated, "__wrapped__", None)
    if inner is None:
        return rebound
    copied, cells = in_decorators(inner, rebound), getattr(decorated, "__closure__", None) or ()
    closure = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    if closure == tuple(cells):
        return copied
    outer = types.FunctionType(
        decorated.__code__, decorated.__globals__, decorated.__name__, decorated.__defaults__, closure
    )
    outer.__kwdefaults__ = decorated.__kwdefaults__
    return outer


def leads_to(found: Any, ours: Any, module: nn.Module) -> bool:
    """Whether a forward is `ours`, or a wrapper that holds it.

    A wrapper holds the forward inside it as an argument, a default, a variable of its closure or its module, an
    attribute, or under another name on the module that it belongs to, as accelerate does.
    """
    seen: dict[int, Any] = {}
    level = {id(found): found}
    for _ in range(_DEEPEST_WRAPPER + 1):
        if id(ours) in level:
            return True
        seen |= level
        inside = (inner for one in level.values() for inner in _held_by(one, module))
        level = {id(inner): inner for inner in inside if id(inner) not in seen}
    return False


def _held_by(found: Any, module: nn.Module) -> list[Any]:
    """What a wrapper of a module's forward holds."""
    if found is None or isinstance(found, nn.Module | Tensor | type | types.ModuleType):
        return []
    inside: list[Any] = [getattr(found, "__wrapped__", None), getattr(found, "__func__", None)]
    if isinstance(found, functools.partial):
        inside += [found.func, *found.args, *found.keywords.values()]
    if isinstance(found, types.FunctionType):
        cells = (cell.cell_contents for cell in found.__closure__ or () if _is_filled(cell))
        inside += [*cells, *(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()]
        names = names_in(found.__code__) - {"forward"}
        # A script holds the forward that it wraps under a global name.
        known = {} if is_of_transformers(found.__module__ or "") else found.__globals__
        inside += [holder.get(name) for holder in (module.__dict__, known) for name in names]
    elif not isinstance(found, types.MethodType):
        inside += getattr(found, "__dict__", {}).values()
    return inside


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def unknown_seam(found: str) -> UnsupportedError:
    """Returns the error for a name, a signature or a shape that discovery does not know, given what was found."""
    return UnsupportedError(
        f"{found} It was read in transformers {transformers.__version__}, which may differ from the versions that "
        "hf_posenc was tested with. Declare the architecture with hf_posenc.register_architecture, or use one of these."
    )


def registered_function(config: PreTrainedConfig) -> Any:
    """The attention function of a model if other code than transformers has registered it, else `None`."""
    found = dict(ALL_ATTENTION_FUNCTIONS).get(getattr(config, "_attn_implementation", None) or "")
    return None if getattr(found, "__module__", "transformers").startswith("transformers") else found
