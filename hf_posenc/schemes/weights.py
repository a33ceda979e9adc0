"""Weights and constants of parts: how they start, their copies on devices, and values that follow from them.

Layers share such values in a call, and a cache keeps them. In a program that is being traced, other rules hold.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from hf_posenc.errors import SequenceLengthError

Value = TypeVar("Value")
ModuleType = TypeVar("ModuleType", bound=nn.Module)
#: One part, or those of several layers.
Parts = nn.Module | Sequence[nn.Module]
#: The types of options that may be changed in one layer.
_NUMBERS_AND_WORDS = frozenset((bool, int, float, str))
#: Where the modules are written that compute the same until a weight or a buffer changes.
_FOLLOWS_WEIGHTS = (f"{__name__.partition('.')[0]}.", "torch.nn.")


def traced() -> bool:
    """Whether the code is being traced by a compiler or an exporter, so that values of tensors cannot be read."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def exporting() -> bool:
    """Whether the code is being traced into a program that runs without this package: torch.export, ONNX, TorchScript.

    Such a program must not contain operators of this package, and must not depend on the lengths of the example.
    """
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def assert_in_graph(condition: Tensor | torch.SymBool, message: str) -> None:
    """Makes a compiled graph raise a `RuntimeError` where a 0-dim bool tensor, or a statement about lengths, is false.

    On a GPU torch refuses messages of 255 characters and more.
    """
    if isinstance(condition, torch.SymBool):
        torch._check(condition, lambda: message)
    else:
        torch._assert_async(condition, message[:254])


def require(condition: Tensor, message: str, error: type[Exception] = SequenceLengthError) -> None:
    """Raises an error where a 0-dim bool tensor is false.

    A compiled graph, and a device that computes later than the host asks, raise a `RuntimeError` when they get there:
    reading the tensor would make the host wait.

    Raises:
        SequenceLengthError: with the message, or another `error`.
    """
    if torch.compiler.is_compiling() or not condition.is_cpu:
        assert_in_graph(condition, message)
    elif not bool(condition):
        raise error(message)


def known_true(condition: bool | torch.SymBool) -> bool:
    """Whether a statement about lengths is true, as far as a compiler knows it."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    # Imported here, because it loads sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


class Layers(Sequence[Any]):
    """Parts of several layers, of one class, that are computed together."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = tuple(parts)
        self._stacks: list[tuple[list[Tensor], Tensor]] = []

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)

    def stack(self, weights: list[Tensor]) -> Tensor:
        """`(layers, ...)`: a tensor of each layer, which depends on the weights of that layer alone."""
        stack = torch.stack(weights)
        if stack.requires_grad:
            self._stacks.append((weights, stack))
        return stack

    def stacked(self, inner: Sequence[Any] | None = None) -> Any:
        """A copy of the first part, or of its `inner` module, whose weights are those of all, `(layers, ...)`."""
        parts = self.parts if inner is None else inner
        first, kind = parts[0], type(parts[0])
        modules = dict(first._modules)
        if parametrize.is_parametrized(first):
            # The copy has the values instead, and the class that a parametrization was registered on.
            kind = kind.__mro__[1]
        # FSDP exchanges parameters for plain tensors.
        values = (*modules.pop("parametrizations", ()), *vars(first).get("_starts", ()))
        names = dict.fromkeys((*first._parameters, *values))
        stacks = {name: self.stack([getattr(part, name) for part in parts]) for name in names}
        made: Any = object.__new__(kind)
        made.__dict__ = {**vars(first), **stacks}
        made._modules = {name: self.stacked([part._modules[name] for part in parts]) for name in modules}
        return made

    def apart(self, values: Sequence[Any]) -> Sequence[Any]:
        """Values that were computed from the stacks, with the gradients of layers that compute alone.

        Args:
            values: a value for each layer: a tensor, or tuples of tensors and `None`.
        """
        if len(self) == 1 or not self._stacks or not torch.is_grad_enabled():
            return values
        leaves = [(layer, leaf) for layer, value in enumerate(values) for leaf in tree_leaves(value)]
        learned = [any(weights[layer].requires_grad for weights, _ in self._stacks) for layer in range(len(self))]
        weights = [weight for of_layers, _ in self._stacks for weight in of_layers]
        made = _Apart.apply(leaves, learned, [stack for _, stack in self._stacks], *weights)
        return cast("list[Any]", tree_unflatten(made, tree_structure(list(values))))


class _Apart(torch.autograd.Function):
    """Gives a layer that did not run, or that the loss does not depend on, no gradient instead of zeros.

    With zeros an optimizer would decay its weights. Layers may have a backward pass each, so nothing is freed after the
    first one. The gradient is that of the stacks, so that hooks of a weight are called once.
    """

    @staticmethod
    def forward(ctx: Any, leaves: list[Any], learned: list[bool], stacks: list[Tensor], *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.leaves, ctx.stacks, ctx.number = leaves, stacks, len(learned)
        made = [leaf if leaf is None else leaf.detach() for _, leaf in leaves]
        fixed = [not learned[layer] or not requires_grad(leaf) for layer, leaf in leaves]
        ctx.mark_non_differentiable(*(leaf for leaf in itertools.compress(made, fixed) if leaf is not None))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        known = [*itertools.compress(ctx.leaves, (gradient is not None for gradient in gradients))]
        if not known:
            return None, None, None, *(None for _ in ctx.stacks for _ in range(ctx.number))
        layers, given = {layer for layer, _ in known}, [*filter(torch.is_tensor, gradients)]
        # The graph is kept, and one is made for another pass.
        options = (True, torch.is_grad_enabled())
        of_stacks = torch.autograd.grad([leaf for _, leaf in known], ctx.stacks, given, *options, allow_unused=True)
        each = [[None] * ctx.number if stack is None else stack.unbind(0) for stack in of_stacks]
        return None, None, None, *(of[layer] if layer in layers else None for of in each for layer in range(ctx.number))


def of_stacked(layers: Layers, *inputs: Any) -> Tensor:
    """What several layers compute together, by a `forward` that takes weights with an axis of layers in front."""
    result: Tensor = layers.stacked().forward(*inputs)
    return result


@torch.no_grad()
def copied_(weight: Tensor, values: Tensor) -> None:
    """Sets a weight to the values that it starts with, which are on the CPU."""
    weight.copy_(values)


class LearnedWeights(nn.Module):
    """Base class of modules that state with each parameter how it starts."""

    #: What fills each parameter, by name.
    _starts: dict[str, Callable[[Tensor], object]]

    def learned(
        self, name: str, shape: int | Sequence[int], start: Callable[..., object] = nn.init.normal_, **options: Any
    ) -> nn.Parameter:
        """A new parameter, which `start` fills now and in `reset_parameters`.

        Args:
            name: the attribute that holds it.
            shape: its sizes.
            start: takes the parameter and the options, like the functions of `torch.nn.init`.
            **options: those of `start`.

        Raises:
            TypeError: in a class that overrides `reset_parameters`, which would not be called.
        """
        if type(self).reset_parameters is not LearnedWeights.reset_parameters:
            raise TypeError(
                f"{type(self).__name__} overrides reset_parameters, which would be ignored: the call of `learned` that "
                "creates a weight defines how it starts. Override `learned`, or create all weights of the part "
                "yourself."
            )
        parameter = nn.Parameter(torch.empty(shape))
        starts = vars(self).setdefault("_starts", {})
        starts[name] = functools.partial(start, **options)
        starts[name](parameter)
        return parameter

    def reset_parameters(self) -> None:
        """Starts the learned parameters of this part again, for example after it was built on the meta device."""
        for name, start in vars(self).get("_starts", {}).items():
            start(getattr(self, name))


class NativeTable(nn.Module):
    """Mixin of parts with one table, which takes over a stock table of the same shape."""

    weight: nn.Parameter

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies a stock table of the same shape."""
        if native.shape != self.weight.shape:
            return False
        self.weight.copy_(native)
        return True


def modules_of(part: nn.Module) -> list[nn.Module]:
    """A part and its submodules. `part.modules()` calls many functions."""
    modules = [part]
    for module in part._modules.values():
        modules += () if module is None else modules_of(module)
    return modules


def likeness(module: nn.Module) -> Hashable:
    """What is equal for modules of several layers that can be computed together: all but the numbers in weights."""
    weights = [weight for weight in module._parameters.values() if weight is not None]
    options = [option for option in vars(module).items() if type(option[1]) in _NUMBERS_AND_WORDS]
    return type(module), *[(weight.device, weight.dtype, weight.shape) for weight in weights], *options


def is_changed(module: nn.Module) -> bool:
    """Whether somebody has set hooks on a module, or replaced its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def may_be_joined(part: nn.Module, alike: list[Hashable], device: torch.device | None) -> bool:
    """Whether a part with weights on a device has modules that are `alike`, and nobody has changed one of them."""
    modules = modules_of(part)
    if [*map(likeness, modules)] != alike or any(map(is_changed, modules)):
        return False
    weights = weights_of(part)
    # All are on the same device. FSDP may have exchanged them for plain tensors.
    return len(weights) > 0 and bool(weights[0].device == device) and not has_hooks(weights)


def requires_grad(value: Any) -> bool:
    """Whether a value, or one of the values in a tuple, requires grad."""
    if isinstance(value, tuple):
        return any(map(requires_grad, value))
    return not isinstance(value, int | float) and getattr(value, "requires_grad", False)


class KeptValues(dict[tuple[Hashable, ...], tuple[Any, ...]]):
    """Values that follow from weights and buffers of parts, kept with a cache. Not included when it is copied.

    Values of a part that runs code of others are not kept.
    """

    #: How many forward calls with gradients the stack had before: fused optimizers do not count what they write.
    trainings = 0

    def of(
        self, part: Parts, name: Hashable, compute: Callable[[], Value], fits: Callable[[Value], bool] | None = None
    ) -> Value:
        """The value that is kept, if it `fits` and weights and buffers are the same, or `compute()`."""
        parts = (part,) if isinstance(part, nn.Module) else part
        # A weak reference: a cache may outlive the model. The numbers change when a weight is replaced or written to.
        state: list[Any] = [*map(weakref.ref, parts)]
        weights: list[Tensor] = []
        # Most parts have no submodules, and every layer asks.
        for module in [inner for part in parts for inner in (modules_of(part) if part._modules else (part,))]:
            written_in = module.__dict__.get("written_in", type(module).__module__)
            if module._forward_hooks or module._forward_pre_hooks or not written_in.startswith(_FOLLOWS_WEIGHTS):
                return compute()
            for weight in (*module._parameters.values(), *module._buffers.values()):
                if weight is not None:
                    weights.append(weight)
                    state += (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        key = (id(parts[0]), len(parts), name)
        known = self.get(key)
        if known is not None and known[0] == state and (fits is None or fits(known[1])):
            return known[1]
        for other in [other for other, (owner, *_) in self.items() if owner[0]() is None]:
            del self[other]
        value = compute()
        # Memory that is held cannot be that of another weight later.
        self[key] = state, value, [weight.detach() for weight in weights]
        return value

    def __reduce__(self) -> tuple[type[KeptValues], tuple[()]]:
        return KeptValues, ()


class AlikeParts:
    """Finds the parts of several layers that differ only in their parameters. A part of several layers counts once.

    Args:
        layers: returns a name of the kind of each layer, or `None`, and the parts in it.
    """

    def __init__(self, layers: Callable[[], Iterable[tuple[Hashable, Sequence[nn.Module]]]]) -> None:
        self._layers = layers
        self._found: dict[int, list[nn.Module]] | None = None

    def of(self, part: ModuleType) -> list[ModuleType]:
        """The parts that are like a part, itself included. A part without parameters of its own is alone."""
        if self._found is None:
            alike: dict[Hashable, dict[int, nn.Module]] = {}
            for kind, parts in self._layers():
                for number, each in enumerate(parts if kind is not None else ()):
                    modules = modules_of(each)
                    # Hooks may compute weights. Those of a layer that did not run yet would be old.
                    for place, module in enumerate(() if any(map(is_changed, modules)) else modules):
                        weights = [weight for weight in module._parameters.values() if weight is not None]
                        if len(weights) == len(module._parameters) > 0 and not has_hooks(weights):
                            alike.setdefault((kind, number, place, likeness(module)), {})[id(module)] = module
            self._found = {key: [*group.values()] for group in alike.values() for key in group}
        return cast("list[ModuleType]", self._found.get(id(part), [part]))


def of_each(layers: Layers, compute: Callable[[Layers], tuple[Tensor | None, ...]]) -> list[tuple[Any, ...]]:
    """What `compute` gives for each of several parts: its values have an axis of the parts in front."""
    values = ([None] * len(layers) if value is None else value.unbind(0) for value in compute(layers))
    return list(zip(*values, strict=True))


def weights_of(part: nn.Module) -> list[Tensor]:
    """The parameters of a part and its submodules."""
    return [weight for module in modules_of(part) for weight in module._parameters.values() if weight is not None]


def has_hooks(weights: Sequence[Tensor]) -> bool:
    """Whether somebody has set hooks on one of these weights. Those of layers that did not run must not be called."""
    return any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in weights)


def carries_more() -> bool:
    """Whether tensors carry more than their numbers, in function transforms and in forward-mode differentiation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def gradients_may_be_shared() -> bool:
    """Whether layers may share values that require grad: not if one of the layers is recomputed (checkpointing)."""
    if traced() or torch._C._current_graph_task_id() != -1 or carries_more():
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class _Projected(torch.autograd.Function):
    """Clamped values, without the gradients that would move them further out of the range.

    The bounds are no arguments: with `dynamic=True`, torch.compile takes no Python numbers here.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, clamped: Tensor) -> Tensor:
        return clamped.view_as(clamped)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, clamped = ctx.saved_tensors
        (gradient,) = gradients
        outward = ((values < clamped) & (gradient > 0)) | ((values > clamped) & (gradient < 0))
        return gradient.masked_fill(outward, 0.0), None


class _ProjectedForward(_Projected):
    """Also has the forward-mode derivative of a clamp. torch.compile takes no class with one."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        _Projected.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        values, clamped = ctx.saved_tensors
        return tangent.masked_fill(values != clamped, 0.0)


def projected(values: Tensor, minimum: float, maximum: float) -> Tensor:
    """Clamps `values` to `[minimum, maximum]` and keeps gradients that lead back into the range.

    A plain clamp has no gradient outside the range, so a parameter that leaves the range would never return. Here it
    receives all gradients except those that would move it further out.

    Args:
        values: of any shape.
        minimum: may be `-inf`.
        maximum: may be `inf`.
    """
    if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or carries_more()):
        return values.clamp(minimum, maximum)
    kind = _Projected if torch.compiler.is_compiling() else _ProjectedForward
    result: Tensor = kind.apply(values, values.detach().clamp(minimum, maximum))
    return result


def once_in_graph(memo: dict[Hashable, Any], name: Hashable, compute: Callable[[], Value], *sources: Any) -> Value:
    """`compute()`, evaluated once in a compiled graph for the same sources.

    Values that require grad are not shared: a layer that is recomputed must not read those of another one.

    Args:
        memo: where the values of one forward call are kept.
        name: the name of the value.
        compute: computes the value.
        *sources: tensors, and lengths. Lengths are compared by what the compiler knows of them, because a lookup by
            length would specialise the graph to that length.
    """
    entries = memo.setdefault(("in graph", name, torch.is_grad_enabled()), [])
    for known, value in entries:
        if all(map(_same, known, sources)):
            return cast("Value", value)
    computed = compute()
    if not requires_grad(computed):
        entries.append((sources, computed))
    return computed


def number_in_graph(memo: dict[Hashable, Any], source: object) -> int:
    """A number of an object in a compiled graph. Older versions of torch cannot trace the id of a tensor."""
    numbered = memo.setdefault("numbered", [])
    for number, known in enumerate(numbered):
        if known is source:
            return number
    numbered.append(source)
    return len(numbered) - 1


def _same(known: Any, source: Any) -> bool:
    if isinstance(known, Tensor) or isinstance(source, Tensor):
        return known is source
    return known_true(known == source)
