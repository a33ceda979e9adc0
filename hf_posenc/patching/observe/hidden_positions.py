"""Making sure that a stack in which no position mechanism was found has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.architectures import Architecture, architecture_of
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.observe.short_runs import has_data, run_briefly, watched
from hf_posenc.patching.place.in_force import encodings
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.schemes import NoneConfig

#: The first two tokens change places: the last one sees both, in a causal model too and in any window.
_ORDER = [1, 0, 2]
#: Sums in another order, in units of the dtype's precision.
_ROUNDING = 16.0


def refuse_hidden_positions(transaction: Transaction, stacks: list[Stack]) -> None:
    """Runs stacks without any known mechanism on three tokens in two orders, and those whose mechanism was silenced.

    Nothing in front of the first layer may depend on a token's place, and what attention gives the last token may not
    depend on the order of those before it. (Deeper layers of a causal model know the order from its mask.) Attention
    behind a recurrent layer, or with a convolution over its keys, is not compared: these know the order too. A
    mechanism that a declaration silences is looked for with the scheme "none" in place. Models on the meta device and
    models that carry a scheme already are passed over; a model in which discovery has found everything by itself costs
    nothing.

    Raises:
        UnsupportedError: for a stack that takes in position where nothing was found, or nothing is left.
    """
    model = transaction.model
    architecture = architecture_of(model.config)
    bare = [stack for stack in stacks if _nothing_found(stack, architecture)]
    silenced = architecture.mechanism or architecture.rotary_method
    if not (bare or silenced) or not has_data(model) or encodings(model):
        return
    if bare:
        _refuse_order(transaction, bare, architecture, _hidden)
    if silenced:
        with transaction.installed(transaction.plan(NoneConfig(), stacks)):
            _refuse_order(transaction, stacks, architecture, _still_there)


def _refuse_order(
    transaction: Transaction, stacks: list[Stack], architecture: Architecture, message: Callable[[Stack, str], str]
) -> None:
    with ExitStack() as hooks:
        seen = [hooks.enter_context(watched(stack, architecture)) for stack in stacks]
        run_briefly(transaction, len(_ORDER))
        with _reordered(transaction.model):
            run_briefly(transaction, len(_ORDER))
    for stack, (embedded, attended, results) in zip(stacks, seen, strict=True):
        if _differ(embedded):
            raise UnsupportedError(message(stack, "the input of its first layer depends on the place of a token"))
        if _differ(attended) or _convolves(stack):
            continue
        last = [result[:, -1:] for result in results]
        if len(last) == 2 and _distance(*last) > 0:
            raise UnsupportedError(message(stack, "what its first attention layer computes depends on their order"))


def _convolves(stack: Stack) -> bool:
    modules = stack.attentions[0].module.modules()
    return any(isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 for module in modules)


def _nothing_found(stack: Stack, architecture: Architecture) -> bool:
    rotates = stack.rotaries or any(attention.rotary_functions for attention in stack.attentions)
    declared = architecture.mechanism or architecture.rotary_method or architecture.native
    return not (rotates or stack.tables or declared)


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
    # Some architectures put tokens of their own in front.
    own = [tensor[:, -len(_ORDER) :] for tensor in inputs]
    return len(own) == 2 and _distance(own[0][:, _ORDER], own[1]) > 0


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference beyond rounding, 0 for none; numbers that are none show nothing."""
    allowed = _ROUNDING * torch.finfo(one.dtype).eps * float(one.abs().max())
    difference = float((one.float() - other.float()).abs().max())
    return difference if difference > allowed else 0.0


def _hidden(stack: Stack, what: str) -> str:
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


def _still_there(stack: Stack, what: str) -> str:
    model_type = stack.config.model_type
    return (
        f"The {architecture_of(stack.config).mechanism or 'rotation'} of this {type(stack.module).__name__} "
        f"({model_type}) was put out of action, and {what} all the same: transformers {transformers.__version__} "
        "computes it elsewhere than hf_posenc knows, and it would stay beside any scheme. Use a version of "
        "transformers that hf_posenc was tested with, or say what silences it with "
        f"hf_posenc.register_architecture({model_type!r}, architecture=...)."
    )
