"""Making sure that a stack in which no position mechanism was found has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.apply import encodings
from hf_posenc.patching.architectures import Architecture, architecture_of
from hf_posenc.patching.observe import run_briefly
from hf_posenc.patching.sites import Stack

#: The first two tokens change places: the last one sees both, in a causal model too and in any window.
_ORDER = [1, 0, 2]
#: Sums in another order, in units of the dtype's precision.
_ROUNDING = 16.0


def refuse_hidden_positions(model: PreTrainedModel, stacks: list[Stack]) -> None:
    """Runs stacks without any known mechanism on three tokens in two orders.

    Nothing in front of the first layer may depend on a token's place, and what attention gives the last token may not
    depend on the order of those before it. (Deeper layers of a causal model know the order from its mask.) Attention
    behind a recurrent layer is not compared, since that layer knows the order too. Models on the meta device and models
    that carry a scheme already are passed over; a model in which something was found costs nothing.

    Raises:
        UnsupportedError: for a stack that takes in position where nothing was found.
    """
    architecture = architecture_of(model.config)
    bare = [stack for stack in stacks if _nothing_found(stack, architecture)]
    hooked = any("_hf_hook" in module.__dict__ for module in model.modules())
    on_meta = not hooked and any(parameter.device.type == "meta" for parameter in model.parameters())
    if not bare or on_meta or encodings(model):
        return
    with ExitStack() as hooks:
        seen = [hooks.enter_context(_watched(stack, architecture)) for stack in bare]
        run_briefly(model, len(_ORDER))
        with _reordered(model):
            run_briefly(model, len(_ORDER))
    for stack, (embedded, attended, results) in zip(bare, seen, strict=True):
        if _differ(embedded):
            raise UnsupportedError(_message(stack, "the input of its first layer depends on the place of a token"))
        if _differ(attended):
            continue
        last = [result[:, -1:] for result in results]
        if len(last) == 2 and _distance(*last) > 0:
            raise UnsupportedError(_message(stack, "what its first attention layer computes depends on their order"))


def _nothing_found(stack: Stack, architecture: Architecture) -> bool:
    rotates = stack.rotaries or any(attention.rotary_functions for attention in stack.attentions)
    declared = architecture.mechanism or architecture.rotary_method or architecture.native
    return not (rotates or stack.tables or declared)


Seen = tuple[list[Tensor], list[Tensor], list[Tensor]]


@contextmanager
def _watched(stack: Stack, architecture: Architecture) -> Iterator[Seen]:
    """Notes the inputs of the first layer, and inputs and outputs of the first attention module."""
    embedded, attended, results = seen = ([], [], [])  # type: Seen

    def note(kept: list[Tensor], values: Any) -> None:
        tensor = next((value for value in values if isinstance(value, Tensor) and value.dim() == 3), None)
        if tensor is not None:
            kept.append((tensor.transpose(1, 2) if architecture.channels_first else tensor).detach())

    def note_input(kept: list[Tensor]) -> Any:
        return lambda module, args, kwargs: note(kept, (*args, *kwargs.values()))

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        values = output.values() if isinstance(output, dict) else output
        note(results, (values,) if isinstance(values, Tensor) else values)

    attention = stack.attentions[0].module
    handles = [
        attention.register_forward_pre_hook(note_input(attended), with_kwargs=True),
        attention.register_forward_hook(note_output),
    ]
    if stack.first_layer is not None:
        handles.append(stack.first_layer.register_forward_pre_hook(note_input(embedded), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _reordered(model: PreTrainedModel) -> Iterator[None]:
    """The tokens of a call change places."""

    def reorder(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        tokens = {name: kwargs[name][:, _ORDER] for name in ("input_ids", "decoder_input_ids") if name in kwargs}
        return args, kwargs | tokens

    handle = model.register_forward_pre_hook(reorder, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _differ(inputs: list[Tensor]) -> bool:
    """Whether the vectors of two calls are others than those of the same tokens at other places."""
    return len(inputs) == 2 and _distance(inputs[0][:, _ORDER], inputs[1]) > 0


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference beyond rounding, 0 for none; numbers that are none show nothing."""
    allowed = _ROUNDING * torch.finfo(one.dtype).eps * float(one.abs().max())
    difference = float((one.float() - other.float()).abs().max())
    return difference if difference > allowed else 0.0


def _message(stack: Stack, what: str) -> str:
    words = stack.module.get_input_embeddings()
    tables = [
        path
        for path, module in stack.module.named_modules()
        if isinstance(module, nn.Embedding) and module is not words and "token_type" not in path
    ]
    candidates = f" Embeddings that are not those of words: {', '.join(tables)}." if tables else ""
    return (
        f"No position table, rotary function or bias was found in this {type(stack.module).__name__}, but {what}: it "
        f"takes in positions in a way of its own, which would stay beside any scheme.{candidates} Declare where with "
        f"hf_posenc.register_architecture({stack.config.model_type!r}, architecture=...): `tables` names tables, "
        "`silence` puts anything else out of action."
    )
