"""Reads the code of a module's forward, replaces the forward on one instance, and runs it with another `self`."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import itertools
import math
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_posenc.patching.call.runtime import StackRuntime
    from hf_posenc.patching.place.encoding import LayerEncoding

#: The global name of transformers' attention interface in modeling modules.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: Depth to which a wrapper is searched for the forward inside it.
_DEEPEST_WRAPPER = 6
#: Prevents torch.compile from compiling a code object separately; `None` if torch has renamed it.
_SKIP_CODE: Any = getattr(eval_frame, "skip_code", None)
#: A cell of a closure without a value, which has no attribute `cell_contents`.
_EMPTY = types.CellType()
#: Packages whose decorators and attention functions occur in stock models.
_OWN_PACKAGES = ("transformers", "torch", "accelerate", "peft", "liger_kernel", "hf_posenc")
_numbers = itertools.count()
_records: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def is_of_transformers(module_name: str) -> bool:
    """Whether a Python module belongs to transformers, or to one of the other packages that stock models run."""
    return module_name.split(".")[0] in _OWN_PACKAGES


def functions_called(forward: types.FunctionType, named: str = "apply_rotary") -> dict[str, Any]:
    """The functions that a forward calls by global names which contain `named`; by default the rotary functions."""
    functions = {name: forward.__globals__.get(name) for name in forward.__code__.co_names if named in name}
    return {name: function for name, function in functions.items() if callable(function)}


def names_used(forward: Any) -> frozenset[str]:
    """All names, variables and strings in the code of a forward."""
    return names_in(inspect.unwrap(forward).__code__)


def codes_in(code: types.CodeType) -> list[types.CodeType]:
    """A code object and those inside it."""
    inside = (codes_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [code, *itertools.chain(*inside)]


@functools.lru_cache(maxsize=1024)
def names_assigned(code: types.CodeType) -> list[str]:
    """The global names that a code object, or one inside it, assigns."""
    instructions = itertools.chain(*map(dis.get_instructions, codes_in(code)))
    return [step.argval for step in instructions if step.opname == "STORE_GLOBAL"]


@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names, variables and strings in a code object, and in those inside it."""
    values = tree_leaves([(each.co_names, each.co_varnames, each.co_consts) for each in codes_in(code)])
    return frozenset(value for value in values if isinstance(value, str))


def forward_parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class's forward. One that takes any arguments passes them on to a base class."""
    for base in kind.__mro__:
        # An attribute, because a compiled forward cannot read the dictionary of a class that was changed.
        parameters = parameters_of(base.forward) if hasattr(base, "forward") else {}
        if any(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in list(parameters.values())[1:]):
            return parameters
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
    for name in names_assigned(function.__code__):
        raise UnsupportedError(
            f"{function.__qualname__} assigns the global name {name}. A scheme runs this code with a copy of its "
            "globals, so no other code would see the value. Keep it in an attribute of the module, or in a list."
        )
    namespace = function.__globals__ | dict(replaced)
    # With `__name__`, dynamo would take the copy for the module itself and guard the globals of the module.
    namespace.pop("__name__", None)
    code = _compiled_with_callers(function.__code__, function.__code__.co_filename)
    return _copied(function, code, namespace, function.__closure__)


@functools.lru_cache(maxsize=1024 if _SKIP_CODE else 0)
def _compiled_with_callers(code: types.CodeType, file: str) -> types.CodeType:
    """A copy of a code object that torch.compile puts into graphs of callers, but does not compile separately.

    What it compiles from a function of one layer would also run for other layers, which have the same code object, but
    the compiled code looks for its kernels in the globals of the function, which only that layer has. The same holds
    for functions inside it. If torch does not have the setting, each function gets code of its own.
    """
    constants = [*code.co_consts]
    for number, inside in enumerate(constants):
        if isinstance(inside, types.CodeType):
            constants[number] = _compiled_with_callers(inside, file)
    copied = code.replace(co_consts=tuple(constants))
    if _SKIP_CODE is not None:
        _SKIP_CODE(copied)
    return copied


def _copied(
    function: Any, code: types.CodeType, namespace: dict[str, Any], closure: tuple[Any, ...] | None
) -> types.FunctionType:
    copied = types.FunctionType(code, namespace, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def in_decorators(decorated: Any, rebound: types.FunctionType) -> types.FunctionType:
    """Puts a copy of the innermost function into copies of its decorators, some of which rename arguments."""
    inner = getattr(decorated, "__wrapped__", None)
    if inner is None:
        return rebound
    copied, cells = in_decorators(inner, rebound), getattr(decorated, "__closure__", None) or ()
    closure = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    return copied if closure == tuple(cells) else _copied(decorated, decorated.__code__, decorated.__globals__, closure)


@functools.lru_cache(maxsize=1024)
def is_other_code(forward: Any) -> bool:
    """Whether the code inside the decorators of a forward is from outside transformers."""
    return not is_of_transformers(written_in(inspect.unwrap(forward)))


def leads_to(forward: Any, ours: Any, module: nn.Module) -> bool:
    """Whether a forward is `ours`, or a wrapper that holds it.

    A wrapper holds the forward inside it as an argument, a default, a variable of its closure or its module, an
    attribute, or under another name on the module that it belongs to, as accelerate does.
    """
    seen: dict[int, Any] = {}
    forward = placed_forward(forward)
    level = {id(forward): forward}
    for _ in range(_DEEPEST_WRAPPER + 1):
        if id(ours) in level:
            return True
        seen |= level
        inside = (inner for holder in level.values() for inner in _held_by(holder, module))
        level = {id(inner): inner for inner in inside if id(inner) not in seen}
    return False


def _held_by(holder: Any, module: nn.Module) -> list[Any]:
    """All objects to which a wrapper of a module's forward refers."""
    if holder is None or isinstance(holder, nn.Module | Tensor | type | types.ModuleType):
        return []
    inside: list[Any] = [getattr(holder, name, None) for name in ("__wrapped__", "__func__", "__self__")]
    if isinstance(holder, functools.partial):
        inside += [holder.func, *holder.args, *holder.keywords.values()]
    if isinstance(holder, types.FunctionType):
        cells = (cell.cell_contents for cell in holder.__closure__ or () if cell != _EMPTY)
        inside += [*cells, *(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values()]
        names = names_in(holder.__code__) - {"forward"}
        # A script holds the forward that it wraps under a global name.
        known = {} if is_of_transformers(holder.__module__ or "") else holder.__globals__
        inside += [holder.get(name) for holder in (module.__dict__, known) for name in names]
    elif not isinstance(holder, types.MethodType):
        inside += getattr(holder, "__dict__", {}).values()
    return inside


def unknown_seam(problem: str, read: Any) -> UnsupportedError:
    """The error for a name, a signature or a shape that discovery does not know in the code of a function or module."""
    source = written_in(type(read).forward if isinstance(read, nn.Module) else read)
    where, remedy = f"{source or 'code'}, which is not part of transformers", "write it as transformers' own models do"
    if source.startswith("transformers."):
        version, remedy = transformers.__version__, "use one of these"
        where = f"transformers {version}, which may differ from the versions that hf_posenc was tested with"
    return UnsupportedError(
        f"{problem} It was read in {where}. Declare the architecture with hf_posenc.register_architecture, or {remedy}."
    )


def written_in(function: Any) -> str:
    """The module with the code of a function, or of the class of an object that is called like one.

    `functools.wraps` gives a wrapper the `__module__` of another function.
    """
    if hasattr(function, "__globals__"):
        return str(function.__globals__.get("__name__", ""))
    return str((function if isinstance(function, types.BuiltinFunctionType) else type(function)).__module__ or "")


def registered_function(config: PreTrainedConfig) -> Any:
    """The attention function of a model if other code than transformers has registered it, else `None`."""
    function = dict(ALL_ATTENTION_FUNCTIONS).get(getattr(config, "_attn_implementation", None) or "")
    return None if function is None or written_in(function).startswith("transformers") else function


@torch.no_grad()
def reads_places(function: Any, attention: nn.Module, layer: LayerEncoding) -> bool:
    """Whether an attention function depends on the order of the keys, for a query that sees all of them."""
    weight = next(attention.parameters(), None)
    if weight is None or weight.is_meta or not weight.is_floating_point() or torch.compiler.is_compiling():
        return False
    shape = (1, layer.num_key_value_heads, 3, layer.head_dim)
    keys = torch.arange(math.prod(shape)).view(shape).sin().to(weight)
    # As many queries as keys, because a function that is always causal may count from the first of both.
    query = keys[:, :1, :1].expand(-1, layer.num_heads, 3, -1)
    orders = (keys[:, :, [0, 1, 2]], keys[:, :, [1, 0, 2]])
    attend = functools.partial(function, scaling=layer.head_dim**-0.5, dropout=0.0)
    first, other = (attend(attention, query, order, order, None)[0] for order in orders)
    return not torch.allclose(first[:, -1], other[:, -1], atol=1e-2, equal_nan=True)


def globals_used(modules: list[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """The global names in the code of the forwards of some modules: the globals, the name, and the value."""
    codes: set[Any] = {inspect.unwrap(type(module).forward) for module in modules}
    functions = [code for code in codes if isinstance(code, types.FunctionType)]
    inside = [(each.__globals__, code.co_names) for each in functions for code in codes_in(each.__code__)]
    return [(known, name, known[name]) for known, names in inside for name in names if name in known]


def replaced_global(known: list[tuple[dict[str, Any], str, Any]]) -> str:
    """The first of the `globals_used` that has another value now, with its module; empty if none has.

    A rotary function may become that of a kernel: a scheme stands in for it anyway.
    """
    for namespace, name, before in known:
        now = namespace.get(name)
        if now is not before and not ("apply_rotary" in name and is_of_transformers(written_in(now))):
            return f"{namespace['__name__']}.{name}"
    return ""


class OfStack:
    """Base class of objects that a scheme places in one module of a stack."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OfStack:
        """Copies it with its module. In the copy of a single layer, it shares the scheme of its stack."""
        watch = getattr(getattr(self, "runtime", None), "watch", None)
        if watch is not None and id(watch.stack) not in memo:
            shared = (getattr(self, name, None) for name in ("runtime", "encoding", "additive"))
            memo.update({id(value): value for value in shared if value is not None})
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state: Any = copy.deepcopy(self.__getstate__(), memo)
        getattr(clone, "__setstate__", clone.__dict__.update)(state)
        return clone


class PlacedForward(OfStack):
    """Stands in for the `forward` of one module instance while a scheme is in place.

    A tool that wraps the forward of a patched module keeps a reference to this object. Removing the scheme retires the
    object, and such a wrapper then runs the stock forward.

    Args:
        module: the module.
        runtime: the runtime of its stack, if the forward needs it.
        encoding: the parts of the scheme in it, if it computes attention.
        inner: a forward that was set on the instance before, or `None` for the forward of its class.
    """

    runtime: StackRuntime
    encoding: LayerEncoding
    #: What an attention is declared to multiply its queries and its keys with, before or after its rotary function.
    operand_factors: tuple[float, float] | None = None

    def __init__(self, module: Any, runtime: Any = None, encoding: Any = None, inner: Any = None) -> None:
        self.module = module
        self.runtime = runtime
        self.encoding = encoding
        self.inner = inner

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of the module without the scheme."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def retire(self) -> None:
        """Makes it run the stock forward, and forget the scheme."""
        self.__class__ = RetiredForward
        self.__dict__ = {"module": self.module, "inner": self.inner}


class RetiredForward(PlacedForward):
    """What a placed forward is after its scheme was removed."""

    @property
    def __wrapped__(self) -> Any:
        """The stock forward, so that `inspect.signature` finds its parameters."""
        return types.MethodType(type(self.module).forward, self.module) if self.inner is None else self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the stock forward."""
        return self.stock(*args, **kwargs)


def place_of_forward(module: nn.Module) -> str:
    """The attribute that holds a module's forward, which is the one inside accelerate's hook for hooked modules."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def as_forward(placed: Any) -> Any:
    """What a module has as its `forward`: a placed object, or its method `run`.

    torch.compile knows methods by their code and other objects by their identity. So layers that are compiled alone
    share their graphs if their attention has a method.
    """
    return getattr(placed, "run", placed) if isinstance(placed, PlacedForward) else placed


def placed_forward(forward: Any) -> Any:
    """The `PlacedForward` whose method a forward is, or the forward itself."""
    owner = getattr(forward, "__self__", None)
    return owner if isinstance(owner, PlacedForward) else forward


def forward_on_instance(module: nn.Module) -> Any:
    """The forward that was set on the instance, by this package or another one; `None` if the class's forward runs.

    A tool may restore a `PlacedForward` after its scheme was removed. Such a retired object is skipped in favour of
    the forward inside it.
    """
    forward = placed_forward(module.__dict__.get(place_of_forward(module)))
    while isinstance(forward, RetiredForward):
        forward = placed_forward(forward.inner)
    # If no forward was set on the instance, accelerate stores a bound method of the class inside its hook, and leaves
    # it on the module when the hook is removed.
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def refuse_foreign_forward(module: nn.Module, path: str = "") -> PlacedForward | None:
    """The forward that a patch has set on a module. Refuses that of another library, which a scheme would bypass."""
    forward = forward_on_instance(module)
    if forward is not None and not isinstance(forward, PlacedForward):
        name = f"{path} ({type(module).__name__})" if path else f"This {type(module).__name__}"
        raise UnsupportedError(
            f"{name} has a forward that another library, or your code, has set on the instance. A position encoding "
            "would bypass it. If the model is patched, call unpatch_model(model) first, which works with that forward "
            "in place. Then remove that forward (with the library that set it, or `del module.forward`), patch the "
            "model, and wrap the forward that the module has then."
        )
    return forward


class OtherForward(PlacedForward):
    """A function of the module and the arguments of its `forward`, which it replaces."""

    def __init__(self, module: Any, function: Callable[..., Any]) -> None:
        super().__init__(module)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(self.module, *args, **kwargs)


def zero_output(module: nn.Module, inputs: Tensor) -> Tensor:
    """Replaces the forward of a table, a linear layer, or a network that ends with one: zeros `(..., out_features)`."""
    if isinstance(module, nn.Embedding):
        return module.weight.new_zeros(()).expand(*inputs.shape, module.embedding_dim)
    width: Any = getattr(module, "out_features", None) or [*module.parameters()][-1].shape[0]
    return inputs.new_zeros(()).expand(*inputs.shape[:-1], width)


def unrotated(heads: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for a method that rotates its first argument, and returns it unchanged."""
    return heads


def unrotated_heads(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces a module that rotates one packed tensor, or a query and a key: returns them unchanged."""
    # A module of flash-attn takes a query as `qkv` if it also gets `kv`, the key and the value.
    given, (first, second) = named_arguments(module, args, kwargs), [*forward_parameters(type(module))][1:3]
    second = "kv" if first == "qkv" else second
    return given[first] if given.get(second) is None else (given[first], given[second])


def view_of(module: nn.Module, replaced: Mapping[str, Any]) -> Any:
    """A view that shares the attributes of a module, later changes included.

    Its class has the name of the module's class, because transformers finds a model's recordable outputs by it.
    """
    kind: Any = type(module)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    view_kind: Any = type(kind.__name__, (kind,), {**replaced, **named})
    view = view_kind.__new__(view_kind)
    object.__setattr__(view, "__dict__", module.__dict__)
    return view


class Viewed:
    """Base class of objects that run the forward of `module` on a view. The view is made once and never copied."""

    module: Any
    _view: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_view": None}

    @property
    def view(self) -> Any:
        """The module with the `replaced` properties and methods."""
        if self._view is None:
            self._view = view_of(self.module, self.replaced())
        return self._view

    def replaced(self) -> dict[str, Any]:
        """Properties and methods of the view's class."""
        raise NotImplementedError


class WithoutTable(Viewed):
    """Runs a stack that adds the rows of a buffer on a view that adds zeros instead. The buffer is not changed."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name

    def replaced(self) -> dict[str, Any]:
        """The buffer."""
        return {self.name: property(lambda view: _ZeroRows(self.module._buffers[self.name]))}


class _ZeroRows:
    def __init__(self, table: Tensor | None) -> None:
        self.table = table

    def to(self, **kwargs: Any) -> Tensor | None:
        """Returns the table, which the stack assigns to its buffer and reads again afterwards."""
        return self.table

    def __getitem__(self, places: tuple[Tensor, slice]) -> Tensor:
        """Returns a single column of zeros, which can be added to embeddings of any width and dtype."""
        return torch.zeros(*places[0].shape, 1, dtype=torch.bool, device=places[0].device)


class WithOverrides:
    """A proxy that overrides some attributes of an object. Assignments go to the object."""

    def __init__(self, target: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the object."""
        return self._target(*args, **kwargs)


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Removes a hook, registered or not. It is found by identity, because an interrupt could lose a handle."""
    for number in [number for number, registered in module._forward_pre_hooks.items() if registered is hook]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def number_of(record: Any) -> int:
    """A number for a record, the only part of it that a compiler reads."""
    number = next(_numbers)
    _records[number] = record
    return number


@torch.compiler.assume_constant_result
def answer_of(number: int, question: str, *about: int) -> Any:
    """The result of a method of a record. It becomes a constant of a graph, which is retraced if the modules change."""
    return getattr(_records[number], question)(*about)
