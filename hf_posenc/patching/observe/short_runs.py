"""Short runs of a stock model, or of one of its parts, on a few tokens, and the vectors that are seen in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

from hf_posenc.errors import PositionEncodingError
from hf_posenc.patching.find.architectures.declaration import architecture_of
from hf_posenc.patching.find.forward_code import forward_parameters
from hf_posenc.patching.find.model_parts import reads_features, reads_pixels
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.observe.example_inputs import (
    NotRunnableError,
    cross_attention_width,
    embeddings,
    pixels,
    series,
)
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.preserve import without_trace

#: The first word of a short text: vocabularies often begin with tokens of another meaning. No text needs so many words.
_FIRST_WORD, _LAST_WORD = 5, 64
#: Tolerance for a different order of summation, in units of the dtype's precision.
_ROUNDING, _HALF_ROUNDING = 16.0, 4.0


def is_runnable(model: nn.Module) -> bool:
    """Whether a model can be run: it is not on the meta device, or accelerate loads its weights."""
    hooked = any("_hf_hook" in module.__dict__ for module in model.modules())
    return hooked or not any(parameter.device.type == "meta" for parameter in model.parameters())


def _subjects(transaction: Transaction, stacks: list[Stack]) -> list[PreTrainedModel]:
    """The modules that are run to observe some stacks: as little of the model as has them.

    Heads may need other inputs, such as an end of the text, and know nothing about positions. A composite model would
    need images or audio, so each stack of its part is run on its own. So are stacks that read features, and vision
    encoders inside a model with a head or a decoder. A class from outside transformers is run whole, because it may
    add positions before its stacks.
    """
    model = transaction.model
    inside = any(stack.grid is not None and stack.module is not model for stack in stacks)
    if inside or len(transaction.parts()) > 1 or any(stack.series is not None for stack in stacks):
        return [stack.module for stack in stacks]
    if not type(model).__module__.startswith("transformers."):
        return [model]
    wanted = {id(stack.module) for stack in stacks}
    within = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return [[module for module in within if wanted <= set(map(id, module.modules()))][-1]]


def run_briefly(
    transaction: Transaction,
    stacks: list[Stack],
    length: int,
    *,
    constant: bool = False,
    change: Callable[[dict[str, Any], int], dict[str, Any]] = lambda arguments, length: arguments,
) -> list[Any]:
    """Runs stacks on a few tokens, without a trace.

    Args:
        transaction: the transaction of the model.
        stacks: the stacks.
        length: number of tokens. Stacks that read features get a series of a fixed length instead.
        constant: whether all frames of such a series, or all pixels of an image, are equal.
        change: changes the arguments of a run on `length` tokens.

    Returns:
        The output of every subject.

    Raises:
        NotRunnableError: if it is unknown what a subject reads, or it fails.
    """
    with without_trace(transaction.model, transaction.device):
        return [
            _run(one, change(_inputs(one, transaction.device, length, constant), length))
            for one in _subjects(transaction, stacks)
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


def _inputs(module: PreTrainedModel, device: torch.device, length: int, constant: bool) -> dict[str, Any]:
    declared = architecture_of(module.config).example_inputs
    if declared is not None:
        return {name: _placed(value, module, device, constant) for name, value in declared(module, length).items()}
    parameters = forward_parameters(type(module))
    if reads_pixels(module):
        images = {name: _placed(value, module, device, constant) for name, value in pixels(module, device).items()}
        missing = [
            name
            for name, parameter in list(parameters.items())[1:]
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if not set(missing) <= set(images):
            raise NotRunnableError(
                f"{type(module).__name__} cannot be run to find out how it uses positions: the meaning of its "
                f"arguments {', '.join(sorted(set(missing) - set(images)))} is unknown."
            )
        return images
    if reads_features(module):
        return series(module, device, constant=constant)
    embedded = next((name for name in ("inputs_embeds", "hidden_states") if name in parameters), None)
    if "input_ids" not in parameters and embedded is not None:
        return {embedded: embeddings(module, device, length)}
    if "input_ids" not in parameters:
        raise NotRunnableError(
            f"{type(module).__name__} does not take token ids, so it cannot be run to find out how it uses positions "
            f"(its arguments: {', '.join(list(parameters)[1:8])})."
        )
    tokens = _token_ids(module, length).to(device)
    # One question with one choice, which is a text, where a model reads `(batch, choices, length)`.
    known = MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()
    chooses = any(kind.__name__ in known for kind in type(module).__mro__)
    given: dict[str, Any] = {"input_ids": tokens.unsqueeze(1) if chooses else tokens}
    if "use_cache" in parameters:
        given["use_cache"] = False
    width = cross_attention_width(module) if "encoder_hidden_states" in parameters else None
    if width is not None:
        given["encoder_hidden_states"] = embeddings(module, device, length, width)
    if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        given["decoder_input_ids"] = tokens
    return given


def _token_ids(module: PreTrainedModel, length: int) -> Tensor:
    """`(1, length)`: a text of words that the vocabularies have, with an end where the config states one."""
    config = module.config.get_text_config()
    stated = [getattr(config, name, None) for name in ("vocab_size", "decoder_vocab_size")]
    count = min([size for size in stated if isinstance(size, int)] or [_LAST_WORD])
    special = {name: value for name, value in config.to_dict().items() if name.endswith("_token_id")}
    reserved = {one for value in special.values() for one in (value if isinstance(value, list) else [value])}
    words = [*range(_FIRST_WORD, min(count, _LAST_WORD)), *range(min(count, _FIRST_WORD))]
    words = [word for word in words if word not in reserved] or words
    ids = list(itertools.islice(itertools.cycle(words), length))
    end = special.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if isinstance(end, int) and 0 <= end < count:
        ids[-1] = end
    return torch.tensor([ids])


def _placed(value: Any, module: PreTrainedModel, device: torch.device, constant: bool) -> Any:
    """An argument where the module is, and of its dtype. In a constant image or series all numbers are equal."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        value = (torch.ones_like(value) if constant else value).to(module.dtype)
    return value.to(device)


def tokens_of(stack: Stack, values: Any) -> tuple[Tensor | None, Tensor | None]:
    """The first tensor of vectors among arguments or outputs, and a view of it, `(batch, length, hidden)`.

    Images and windows of sound may be packed in one row, and patches may have rows and columns on axes of their own.
    """
    values = (values,) if isinstance(values, Tensor) else values.values() if isinstance(values, dict) else values
    tensors = [value for value in values if isinstance(value, Tensor)]
    axes: tuple[int, ...] = (2, 3, 4) if stack.grid is not None else (2, 3)
    if stack.grid is None and stack.series is None:
        # Hidden states come first. Of another shape, they are those of several streams.
        tensors, axes = tensors[:1], (3,)
    found = next((tensor for tensor in tensors if tensor.dim() in axes), None)
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
    transaction: Transaction, stacks: list[Stack], tokens: int, watch: Callable[[Stack], Any], **options: Any
) -> list[Any]:
    """What was seen of each stack in a short run, by a context manager that watches it."""
    with ExitStack() as hooks:
        seen = [hooks.enter_context(watch(stack)) for stack in stacks]
        run_briefly(transaction, stacks, tokens, **options)
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
