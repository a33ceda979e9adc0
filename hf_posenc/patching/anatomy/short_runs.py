"""Short runs of a stock model, or of one of its parts, on a few tokens, and the vectors that are seen in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.anatomy.architectures import architecture_of
from hf_posenc.patching.anatomy.forward_code import forward_parameters
from hf_posenc.patching.anatomy.kinds import layout_of
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.preserve import without_trace

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Anatomy

#: Tolerance for a different order of summation, in units of the dtype's precision.
_ROUNDING, _HALF_ROUNDING = 16.0, 4.0


class NotRunnableError(UnsupportedError):
    """A model cannot be run on inputs that this package makes."""


def _subjects(anatomy: Anatomy, stacks: list[Stack]) -> list[PreTrainedModel]:
    """The modules that are run to observe some stacks: as little of the model as has them.

    Heads may need other inputs, such as an end of the text, and know nothing about positions. A composite model would
    need images or audio, so each stack of its part is run on its own. A class from outside transformers is run whole,
    because it may add positions before its stacks.
    """
    model = anatomy.model
    if len(anatomy.parts) > 1 or any(stack.layout.runs_alone(stack, model) for stack in stacks):
        return [stack.module for stack in stacks]
    if not type(model).__module__.startswith("transformers."):
        return [model]
    wanted = {id(stack.module) for stack in stacks}
    within = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return [[module for module in within if wanted <= set(map(id, module.modules()))][-1]]


def run_briefly(
    anatomy: Anatomy,
    stacks: list[Stack],
    length: int,
    *,
    constant: bool = False,
    change: Callable[[dict[str, Any], int], dict[str, Any]] = lambda arguments, length: arguments,
) -> list[Any]:
    """Runs stacks on a few tokens, without a trace.

    Args:
        anatomy: the anatomy of their model.
        stacks: the stacks.
        length: number of tokens. Images and series have a fixed size instead.
        constant: whether all frames of a series, or all pixels of an image, are equal.
        change: changes the arguments of a run on `length` tokens.

    Returns:
        The output of every subject.

    Raises:
        NotRunnableError: if it is unknown what a subject reads, or it fails.
    """
    device = anatomy.device
    with without_trace(anatomy.model, device):
        return [
            _run(one, change(_arguments(one, device, length, constant), length)) for one in _subjects(anatomy, stacks)
        ]


def _run(module: PreTrainedModel, arguments: dict[str, Any]) -> Any:
    try:
        return module(**arguments)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        # What an architecture requires beyond its tokens is unknown, so are its errors.
        if isinstance(error, PositionEncodingError):
            raise
        raise NotRunnableError(
            f"{type(module).__name__} could not be run on a few tokens to find out how it uses positions. With "
            f"{', '.join(arguments)} it failed: {type(error).__name__}: {error}. State the arguments of such a run: "
            f"hf_posenc.register_architecture({module.config.model_type!r}, "
            "architecture=hf_posenc.Architecture(example_inputs=...))."
        ) from error


def _arguments(module: PreTrainedModel, device: torch.device, length: int, constant: bool) -> dict[str, Any]:
    """The arguments of a run where the module is, and of its dtype."""
    declared = architecture_of(module.config).example_inputs
    if declared is None:
        given = layout_of(module).example(module, length, constant)
    else:
        given = declared(module, length)
        given = {name: torch.ones_like(one) if constant and _is_real(one) else one for name, one in given.items()}
    given = {name: one.to(module.dtype) if _is_real(one) else one for name, one in given.items()}
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in given.items()}


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def missing_arguments(module: nn.Module, given: Collection[str]) -> list[str]:
    """The names of the arguments that a forward requires, besides some."""
    return [
        name
        for name, parameter in list(forward_parameters(type(module)).items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in given
    ]


def tokens_of(stack: Stack, values: Any) -> tuple[Tensor | None, Tensor | None]:
    """The first tensor of vectors among arguments or outputs, and a view of it, `(batch, length, hidden)`.

    Images and windows of sound may be packed in one row, and patches may have rows and columns on axes of their own.
    """
    values = (values,) if isinstance(values, Tensor) else values.values() if isinstance(values, dict) else values
    tensors = [value for value in values if isinstance(value, Tensor)]
    if stack.layout.takes_tokens:
        # Hidden states come first. Of another shape, they are those of several streams.
        tensors = tensors[:1]
    found = next((tensor for tensor in tensors if tensor.dim() in stack.layout.token_axes), None)
    if found is None:
        return None, None
    tokens = found
    if tokens.dim() == 2:
        tokens = tokens.unsqueeze(0)
    elif tokens.dim() == 4:
        channels_first = tokens.shape[1] == stack.hidden_size != tokens.shape[3]
        tokens = (tokens.movedim(1, 3) if channels_first else tokens).flatten(1, 2)
    if stack.architecture.channels_first:
        tokens = tokens.transpose(1, 2)
    return found, tokens.transpose(0, 1) if stack.architecture.time_major else tokens


def exchanged(found: Tensor, other: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments with another tensor in place of one of them."""
    return (
        tuple(other if value is found else value for value in args),
        {name: other if value is found else value for name, value in kwargs.items()},
    )


def seen_briefly(
    anatomy: Anatomy, stacks: list[Stack], tokens: int, watch: Callable[[Stack], Any], **options: Any
) -> list[Any]:
    """What was seen of each stack in a short run, by a context manager that watches it."""
    with ExitStack() as hooks:
        seen = [hooks.enter_context(watch(stack)) for stack in stacks]
        run_briefly(anatomy, stacks, tokens, **options)
    return seen


@contextmanager
def embedded(stack: Stack) -> Iterator[list[Tensor]]:
    """Records the input of the first layer, `(batch, length, hidden)`, of each call in a `with` block."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = tokens_of(stack, (*args, *kwargs.values()))[1]
        if tokens is not None:
            seen.append(tokens.detach())

    if stack.first_layer is None:
        yield seen
        return
    with stack.first_layer.register_forward_pre_hook(note, with_kwargs=True):
        yield seen


@contextmanager
def attended_twice(stack: Stack, chosen: Callable[[int], list[int]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Runs the first attention module of a stack once more in every call in a `with` block, with other vectors.

    Args:
        stack: the stack.
        chosen: the places of the vectors that the tokens have instead of their own, for a number of tokens.

    Yields:
        For each call, the outputs with the other vectors and with the own ones, `(batch, length, hidden)`.
    """
    before: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []

    def run_again(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        before.clear()
        found, tokens = tokens_of(stack, (*args, *kwargs.values()))
        if found is None or tokens is None:
            return
        other = found.clone(memory_format=torch.contiguous_format)
        changed = tokens_of(stack, other)[1]
        assert changed is not None
        changed.copy_(tokens[:, chosen(tokens.shape[1])])
        args, kwargs = exchanged(found, other, args, kwargs)
        result = tokens_of(stack, module.forward(*args, **kwargs))[1]
        before.extend(() if result is None else (result,))

    def note(module: nn.Module, args: Any, output: Any) -> None:
        result = tokens_of(stack, output)[1]
        if before and result is not None:
            seen.append((before[0], result))

    attention = stack.attentions[0].module
    hook = attention.register_forward_pre_hook(run_again, with_kwargs=True)
    with hook, attention.register_forward_hook(note):
        yield seen


def distance(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; 0 if it is within rounding error or NaN."""
    rounding = _ROUNDING if torch.finfo(one.dtype).bits >= 32 else _HALF_ROUNDING
    allowed = rounding * torch.finfo(one.dtype).eps * float(one.abs().max())
    difference = float((one.float() - other.float()).abs().max())
    return difference if difference > allowed else 0.0
