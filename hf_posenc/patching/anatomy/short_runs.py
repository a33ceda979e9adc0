"""Short runs of a stock model, or of one of its parts, on a few tokens, and the vectors that are seen in them.

`TokenOrder` gives every layer of a stack of text the same tokens in two orders, to see what depends on their positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack, layout_of
from hf_posenc.patching.anatomy.architectures import architecture_of
from hf_posenc.patching.anatomy.sites import AttentionLayer
from hf_posenc.patching.anatomy.weights import execution_device, gathered_in_forwards
from hf_posenc.patching.forwards import forward_parameters
from hf_posenc.preserve import without_trace

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Anatomy

#: Tolerance for a different order of summation, in units of the dtype's precision.
_ROUNDING, _HALF_ROUNDING = 16.0, 4.0
#: What to do about unknown arguments, without the `model_type`.
_STATE_INPUTS = (
    "Define the arguments of such a run: hf_posenc.register_architecture({!r}, "
    "architecture=hf_posenc.Architecture(example_inputs=...))."
)


class NotRunnableError(UnsupportedError):
    """A model cannot be run on inputs that this package makes."""


def _subjects(anatomy: Anatomy, stacks: list[Stack]) -> list[PreTrainedModel]:
    """The modules that are run to observe some stacks: the smallest parts of the model that contain them.

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


@torch.compiler.disable
def run_briefly(
    anatomy: Anatomy,
    stacks: list[Stack],
    length: int,
    *,
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> list[Any]:
    """Runs stacks on a few tokens, without a trace. Returns the output of every subject.

    Args:
        anatomy: the anatomy of their model.
        stacks: the stacks.
        length: number of tokens. Images and series have a fixed size instead.
        change: returns the arguments of a run, given the usual ones.

    Raises:
        NotRunnableError: if it is unknown what a subject reads, or it fails.
    """
    device = execution_device(anatomy.model)
    with without_trace(anatomy.model, device), gathered_in_forwards(anatomy.model):
        return [_run(subject, change(_arguments(subject, device, length))) for subject in _subjects(anatomy, stacks)]


def _run(module: PreTrainedModel, arguments: dict[str, Any]) -> Any:
    try:
        return module(**arguments)
    except Exception as error:
        # It is unknown what an architecture requires beyond its tokens, so any error may occur.
        if isinstance(error, PositionEncodingError):
            raise
        raise NotRunnableError(
            f"{type(module).__name__} could not be run on a few tokens to find out how it uses positions. With "
            f"{', '.join(arguments)} it failed: {type(error).__name__}: {error}. "
            f"{_STATE_INPUTS.format(module.config.model_type)}"
        ) from error


def _arguments(module: PreTrainedModel, device: torch.device, length: int) -> dict[str, Any]:
    """The arguments of a run where the module is, and of its dtype."""
    declared = architecture_of(module).example_inputs
    if declared is None:
        kind = layout_of(module)
        given = kind.example(module, length)
        missing = [] if kind.takes_tokens else missing_arguments(module, given)
        if missing:
            raise unknown_inputs(module, f"needs {' and '.join(missing)}, which is not known")
    else:
        given = declared(module, length)
    if "use_cache" in forward_parameters(type(module)):
        given = given | {"use_cache": given.get("use_cache", False)}
    tensors = {name: tensor.to(device) for name, tensor in given.items() if isinstance(tensor, Tensor)}
    real = {name: tensor.to(module.dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
    return given | tensors | real


def all_equal(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a run, in which all numbers of a series or an image are equal."""
    tensors = ((name, value) for name, value in arguments.items() if isinstance(value, Tensor))
    return arguments | {name: torch.ones_like(tensor) for name, tensor in tensors if tensor.is_floating_point()}


def unknown_inputs(module: Any, why: str) -> NotRunnableError:
    """Returns the error for a module of which it is unknown what it reads, given the reason."""
    parameters = list(forward_parameters(type(module)))[1:8]
    return NotRunnableError(
        f"{type(module).__name__} {why}, so it cannot be run to find out how it uses positions (its arguments: "
        f"{', '.join(parameters)}). {_STATE_INPUTS.format(module.config.model_type)}"
    )


def missing_arguments(module: nn.Module, given: Collection[str]) -> list[str]:
    """The names of the arguments that a forward requires in addition to those that are `given`."""
    parameters = list(forward_parameters(type(module)).values())[1:]
    named = (each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
    return [each.name for each in named if each.default is each.empty and each.name not in given]


def tokens_of(stack: Stack, values: Any) -> tuple[Tensor | None, Tensor | None]:
    """The first tensor of vectors among arguments or outputs, and a view of it, `(batch, length, hidden)`.

    Images and windows of sound may be packed in one row, and patches may have separate axes for rows and columns.
    """
    values = (values,) if isinstance(values, Tensor) else values.values() if isinstance(values, dict) else values
    tensors = [value for value in values if isinstance(value, Tensor)]
    if stack.layout.takes_tokens:
        # Hidden states come first. If they have another shape, they belong to several streams.
        tensors = tensors[:1]
    holder = next((tensor for tensor in tensors if tensor.dim() in stack.layout.token_axes), None)
    if holder is None:
        return None, None
    tokens = holder
    if tokens.dim() == 2:
        tokens = tokens.unsqueeze(0)
    elif tokens.dim() == 4:
        channels_first = tokens.shape[1] == stack.hidden_size != tokens.shape[3]
        tokens = (tokens.movedim(1, 3) if channels_first else tokens).flatten(1, 2)
    if stack.architecture.channels_first:
        tokens = tokens.transpose(1, 2)
    return holder, tokens.transpose(0, 1) if stack.architecture.time_major else tokens


def with_tokens(stack: Stack, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor) -> Any:
    """Returns the arguments of a call with other vectors of tokens, `(batch, length, hidden)`."""
    holder = tokens_of(stack, (*args, *kwargs.values()))[0]
    assert holder is not None
    other = holder.clone(memory_format=torch.contiguous_format)
    view = tokens_of(stack, other)[1]
    assert view is not None
    view.copy_(tokens)
    return (
        tuple(other if value is holder else value for value in args),
        {name: other if value is holder else value for name, value in kwargs.items()},
    )


def seen_briefly(
    anatomy: Anatomy, stacks: list[Stack], tokens: int, watch: Callable[[Stack], Any], **options: Any
) -> list[Any]:
    """The observations of each stack in a short run, recorded by a context manager that watches it."""
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
        chosen: for a number of tokens, returns the places of the vectors that the tokens get instead of their own.

    Yields:
        For each call, the outputs with the other vectors and with the original ones, `(batch, length, hidden)`.
    """
    before: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []

    def run_again(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        before.clear()
        tokens = tokens_of(stack, (*args, *kwargs.values()))[1]
        if tokens is None:
            return
        args, kwargs = with_tokens(stack, args, kwargs, tokens[:, chosen(tokens.shape[1])])
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


def distance(first: Tensor, other: Tensor) -> float:
    """The largest absolute difference; 0 if it is within rounding error or NaN."""
    rounding = _ROUNDING if torch.finfo(first.dtype).bits >= 32 else _HALF_ROUNDING
    allowed = rounding * torch.finfo(first.dtype).eps * float(first.abs().max())
    difference = float((first.float() - other.float()).abs().max())
    return difference if difference > allowed else 0.0


#: The tokens of the second row. The last one sees the others, even in a causal model, if `sees_all`.
ORDER = [1, 0, 2]
_LENGTH = len(ORDER)
#: The problem of a stack that adds positions before its first layer.
EMBEDDED = "the input of its first layer depends on the position of tokens"
#: Arguments with tokens, or with vectors in their place.
_TOKENS = ("input_ids", "decoder_input_ids", "inputs_embeds", "query_embeds", "hidden_states")
#: Makes a difference of logits larger than the rounding of half precision.
_AMPLIFICATION = 8.0


class _SeenError(BaseException):
    """Ends a run as soon as it has shown what it was started for."""


class TokenOrder:
    """Observes a run of one stack on two rows, which hold the same tokens in two orders.

    Before every layer, and before its attention, the second row is replaced by the first row in the other order,
    because earlier layers may have distinguished tokens by what they see. Without positions, attention then computes
    the same output for the last token, and bidirectional attention for all tokens. A layer with code from outside
    transformers then gets the output of its first row in both orders, and must treat all tokens alike. So must code
    between layers and after the last one.

    The keys that sparse attention reads may depend on their order, so a run of a stack with sparse attention ends at
    the input of its first layer.

    Args:
        stack: the stack, in which no scheme and no native mechanism is active.
        strict: whether any difference of embeddings counts. Otherwise they may depend on the tokens before them.

    Attributes:
        problem: what depends on positions; empty if nothing does.
        unseen: the first attention of other code whose vectors have an unknown shape; empty if there is none.
    """

    def __init__(self, stack: Stack, *, strict: bool) -> None:
        self.stack = stack
        self.strict = strict
        self.problem = self.unseen = ""
        self._embedded = self._in_order = self._ordered = self._attended_in_order = self._left_in_order = False

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Context manager in which the layers of the stack are observed."""
        with ExitStack() as handles:
            stack = self.stack
            handles.enter_context(suppress(_SeenError))
            attentions = [] if stack.sparse else stack.attentions
            paths = filter(None, (_layer_path(attention.path) for attention in attentions))
            layers = {id(layer): layer for layer in map(stack.module.get_submodule, paths)}
            if stack.first_layer is not None:
                layers[id(stack.first_layer)] = stack.first_layer
            for layer in layers.values():
                handles.enter_context(layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True))
                if self.stack.has_other_code:
                    handles.enter_context(layer.register_forward_hook(self._leave_layer))
            if self.stack.has_other_code:
                handles.enter_context(stack.module.register_forward_hook(self._leave_stack))
            for attention in attentions:
                reorder = functools.partial(self._reorder_attention, attention)
                check = functools.partial(self._check_output, attention)
                handles.enter_context(attention.module.register_forward_pre_hook(reorder, with_kwargs=True))
                handles.enter_context(attention.module.register_forward_hook(check, with_kwargs=True))
            yield

    def _enter_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        rows = self._rows((*args, *kwargs.values()))
        # Only the layer that runs first gets embeddings. In a model that loops, it need not be the first of the list.
        if rows is not None and not self._embedded and self._is_positional(rows, self.strict):
            self._note(EMBEDDED)
        if rows is not None and self._left_in_order and self._is_positional(rows, strict=False):
            self._note("the input of a layer after the first depends on the position of tokens")
        self._left_in_order = False
        if self.stack.sparse:
            raise _SeenError
        self._embedded = True
        self._attended_in_order = False
        self._in_order = rows is not None
        return self._reordered(rows, args, kwargs)

    def _reorder_attention(self, attention: AttentionLayer, module: nn.Module, args: Any, kwargs: Any) -> Any:
        rows = self._rows((*args, *kwargs.values()))
        if self._in_order and rows is not None and self._is_positional(rows, strict=False):
            self._note(f"the input of {attention.path} depends on the position of tokens")
        if rows is not None and not self._embedded and self.stack.first_layer is None and self.stack.has_other_code:
            self._embedded = True
            if self._is_positional(rows, strict=False):
                self._note(EMBEDDED)
        self._in_order = False  # Another attention of the same layer gets what this one has seen.
        self._ordered = rows is not None
        return self._reordered(rows, args, kwargs, _AMPLIFICATION)

    def _check_output(
        self, attention: AttentionLayer, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        rows = self._rows(output)
        if self.stack.has_other_code and (rows is None or not self._ordered):
            self.unseen = self.unseen or f"{attention.path} ({_code_of(module)})"
        if rows is None or has_convolution(module) or not sees_all(attention, self.stack):
            return None
        # A model may run the layers of a decoder in both directions, and say so in their attributes.
        causal = attention.causal or bool(kwargs.get("is_causal"))
        causal = causal or any(map(_hides_later_keys, (*args, *kwargs.values())))
        first = rows[0, -1:] if causal else rows[0, -_LENGTH:][ORDER]
        if distance(first, rows[1, -first.shape[0] :]) > 0:
            self._note(f"the output of {attention.path} ({_code_of(module)}) depends on the order of tokens")
        self._attended_in_order = isinstance(output, tuple)
        return self._reordered(rows, output, {})[0] if self._attended_in_order else None

    def _leave_layer(self, layer: nn.Module, args: Any, output: Any) -> Any:
        rows = self._rows(output)
        if rows is not None and self._attended_in_order and self._is_positional(rows, strict=False):
            self._note(f"the output of a layer ({_code_of(layer)}) depends on the position of tokens")
        self._left_in_order = rows is not None
        reordered = self._reordered(rows, output if isinstance(output, tuple) else (output,), {})
        return reordered and (reordered[0] if isinstance(output, tuple) else reordered[0][0])

    def _leave_stack(self, module: nn.Module, args: Any, output: Any) -> None:
        rows = self._rows(output)
        if rows is not None and self._left_in_order and self._is_positional(rows, strict=False):
            self._note("its output depends on the position of tokens")

    def _is_positional(self, rows: Tensor, strict: bool) -> bool:
        """Whether the vectors of the same tokens differ between the rows, and not because they saw other tokens."""
        if self.stack.sparse:
            rows = rows[:, :_LENGTH]  # Padding follows, until the number of tokens is a multiple of a window.
        several, rest = divmod(rows.shape[1], _LENGTH)
        # A module may have made several vectors of each token.
        ways = [rows[:, -_LENGTH:]] + ([] if rest else [torch.unflatten(rows, 1, (_LENGTH, several)).flatten(2)])
        return all(
            distance(outputs[0][ORDER], outputs[1]) > 0 and (strict or distance(outputs[0, -1], outputs[1, -1]) == 0)
            for outputs in ways
        )

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _rows(self, values: Any) -> Tensor | None:
        """`(2, length, hidden)`: the first tensor, batch first; `None` if it has another shape."""
        rows = tokens_of(self.stack, values)[1]
        known = rows is not None and rows.is_floating_point() and rows.shape[0] == 2 and rows.shape[1] >= _LENGTH
        return rows if known else None

    def _reordered(self, rows: Tensor | None, args: Any, kwargs: dict[str, Any], factor: float = 1.0) -> Any:
        """The arguments, with the second row of the hidden states replaced by the first in the other order."""
        if rows is None:
            return None
        before = rows.shape[1] - _LENGTH
        row = rows[0] * factor if torch.finfo(rows.dtype).bits < 32 else rows[0]
        other = row[[*range(before), *(before + place for place in ORDER)]]
        return with_tokens(self.stack, args, kwargs, torch.stack([row, other]))


def in_both_orders(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a run on one row of three tokens, with the row in the other order below it."""
    known = any(name in arguments for name in _TOKENS)
    return {name: _in_both_orders(not known or name in _TOKENS, value) for name, value in arguments.items()}


def _in_both_orders(holds_tokens: bool, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.shape[:1] != (1,) or (value.dim() == 2 and value.is_floating_point()):
        return value  # A vector applies to both rows.
    other = value
    if holds_tokens and _LENGTH in value.shape[1:3]:
        # One question with one choice has another axis before that of the tokens.
        axis = 1 if value.shape[1] == _LENGTH else 2
        other = value.index_select(axis, torch.tensor(ORDER, device=value.device))
    return torch.cat([value, other])


def sees_all(attention: AttentionLayer, stack: Stack) -> bool:
    """Whether a token sees the two before it. A shorter window shows which tokens are next to it."""
    names = ("sliding_window", "window_size")
    holders = (attention.module, stack.config)
    stated = [getattr(holder, name) for holder in holders for name in names if hasattr(holder, name)]
    return not (stated and isinstance(stated[0], int) and 0 < stated[0] < _LENGTH)


def has_convolution(attention: nn.Module) -> bool:
    """Whether an attention module mixes neighbouring tokens by a convolution. Its weights may be computed."""
    return any(
        module.kernel_size[0] > 1
        if isinstance(module, nn.Conv1d | nn.Conv2d)
        else "Convolution" in type(module).__name__
        for module in attention.modules()
    )


def _hides_later_keys(mask: Any) -> bool:
    """Whether an argument is a mask `(batch, heads, queries, keys)` that hides the last key from the first query."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] < _LENGTH:
        return False
    last = mask[..., 0, -1]
    return bool((~last).all() if mask.dtype == torch.bool else (last < -1.0).all())


def _layer_path(path: str) -> str:
    """`layers.0` for an attention at `layers.0.self_attn`; empty if layers are not in a list."""
    names = path.split(".")
    place = next((place for place, name in enumerate(names) if name.isdigit()), None)
    return "" if place is None or place + 1 == len(names) else ".".join(names[: place + 1])


def _code_of(module: nn.Module) -> str:
    """The class of a module, and where its forward is defined if that is elsewhere."""
    forward, kind = type(module).forward, type(module)
    defined = f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', '')}"
    is_its_own = defined == f"{kind.__module__}.{kind.__qualname__}.forward"
    return kind.__name__ if is_its_own else f"{kind.__name__} with the forward {defined}"
