"""Checking that a stack in which no position mechanism was found really has none."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import transformers
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.forward_code import forward_parameters, is_of_transformers, registered_function
from hf_posenc.patching.anatomy.short_runs import (
    NotRunnableError,
    attended_twice,
    distance,
    embedded,
    run_briefly,
    seen_briefly,
)
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.patching.anatomy.token_order import ORDER, TokenOrder, has_convolution, in_both_orders, sees_all
from hf_posenc.schemes import NoneConfig

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Anatomy
    from hf_posenc.patching.anatomy.layout import TemporaryChanges

#: A module that makes several tokens of each repeats itself after so many.
_LONGEST_PERIOD = 8


def refuse_hidden_positions(anatomy: Anatomy, stacks: list[Stack], changes: TemporaryChanges) -> None:
    """Refuses stacks in which positions act although every mechanism that was found is disabled.

    Text: the stacks are run with the scheme "none" on the same three tokens in two orders. No vector may depend on the
    position of its token, and no attention on the order of its keys; see `TokenOrder`. This finds positions in
    embeddings, in the forward of an attention class and in an attention function, whoever has written them.

    Features and pixels: in stacks in which nothing was found, whose mechanism is disabled by a declaration, or with
    code from outside transformers, some tokens close to each other must be equal at the input of the first layer if all
    frames of a series or pixels of an image are, and the first attention must not depend on the order of its keys. The
    latter is not compared for attention with a convolution over its keys.

    Models on the meta device are not checked.

    Raises:
        UnsupportedError: if such a stack depends on the order of tokens.
    """
    if not anatomy.is_runnable:
        return
    text = [stack for stack in stacks if stack.layout.takes_tokens]
    others = [stack for stack in stacks if not stack.layout.takes_tokens]
    bare = [stack for stack in others if _nothing_found(stack)]
    silenced = [stack for stack in others if _is_silenced(stack) or (stack not in bare and has_other_code(stack))]
    if bare:
        _refuse_positions_of_features(anatomy, bare)
    if silenced or text:
        with changes.with_scheme(NoneConfig(), stacks):
            if silenced:
                _refuse_positions_of_features(anatomy, silenced)
            if text:
                try:
                    _refuse_order_of_tokens(anatomy, text)
                except NotRunnableError:
                    # What other inputs a stock model needs is unknown. Its positions were found in its code.
                    if any(_nothing_found(stack) or _is_silenced(stack) or has_other_code(stack) for stack in text):
                        raise


def _refuse_order_of_tokens(anatomy: Anatomy, stacks: list[Stack]) -> None:
    seen = [TokenOrder(stack, strict=_nothing_found(stack) or _is_silenced(stack)) for stack in stacks]
    with ExitStack() as hooks:
        for one in seen:
            hooks.enter_context(one.observed())
        run_briefly(anatomy, stacks, len(ORDER), change=in_both_orders)
    for stack, one in zip(stacks, seen, strict=True):
        if one.problem:
            raise UnsupportedError(_message(stack, one.problem))


def _refuse_positions_of_features(anatomy: Anatomy, stacks: list[Stack]) -> None:
    inputs = seen_briefly(anatomy, stacks, len(ORDER), embedded, constant=True)
    for stack, found in zip(stacks, inputs, strict=True):
        # Convolutions see the edges, so not all tokens are equal.
        if stack.layout.is_comparable(stack, found[0] if found else None):
            tokens = found[0][0]
            periods = range(1, min(_LONGEST_PERIOD, len(tokens) - 1) + 1)
            pairs = (pair for period in periods for pair in zip(tokens[:-period], tokens[period:], strict=True))
            if all(distance(one, other) > 0 for one, other in pairs):
                raise UnsupportedError(
                    _message(stack, "the input of its first layer depends on the position of tokens")
                )
    outputs = seen_briefly(anatomy, stacks, len(ORDER), lambda stack: attended_twice(stack, _before_the_last))
    for stack, results in zip(stacks, outputs, strict=True):
        first = stack.attentions[0]
        if results and sees_all(first, stack) and not has_convolution(first.module):
            one, other = results[0]
            if distance(one[:, -1:], other[:, -1:]) > 0:
                raise UnsupportedError(
                    _message(stack, "the output of its first attention layer depends on token order")
                )


def has_other_code(stack: Stack) -> bool:
    """Whether a module of a stack runs code from outside transformers."""
    return any(not is_of_transformers(type(module).forward.__module__) for module in stack.module.modules())


def _is_silenced(stack: Stack) -> bool:
    """Whether a mechanism is disabled that is neither a table nor a rotary function."""
    declared = stack.mechanism or stack.architecture.rotary_method
    return bool(declared or stack.layout.mechanisms())


def _nothing_found(stack: Stack) -> bool:
    rotates = stack.rotaries or any(attention.rotary_functions for attention in stack.attentions)
    architecture = stack.architecture
    declared = stack.mechanism or architecture.rotary_method or architecture.native
    return not (rotates or declared or stack.layout.vector_sites(stack) or stack.layout.mechanisms())


def _before_the_last(tokens: int) -> list[int]:
    """The order in which the two tokens before the last are swapped. The last one sees both if `sees_all`."""
    return [*range(tokens - 3), tokens - 2, tokens - 3, tokens - 1] if tokens > 2 else [*range(tokens)]


def _message(stack: Stack, what: str) -> str:
    if _nothing_found(stack):
        return _undiscovered_message(stack, what)
    return (_silenced_message if _is_silenced(stack) else _own_message)(stack, what)


def _undiscovered_message(stack: Stack, what: str) -> str:
    words = _token_embeddings(stack.module)
    tables = [
        path
        for path, module in stack.module.named_modules()
        if isinstance(module, nn.Embedding) and module is not words and "token_type" not in path
    ]
    candidates = f" Embeddings other than the token embeddings: {', '.join(tables)}." if tables else ""
    return (
        f"No position table, rotary function or bias was found in this {type(stack.module).__name__}, but {what}. It "
        f"has an unknown position mechanism, which would remain active next to any scheme.{candidates} Declare the "
        f"mechanism with hf_posenc.register_architecture({stack.config.model_type!r}, architecture=...): `tables` "
        "names position tables, and `silence` disables any other mechanism."
    )


def _token_embeddings(module: PreTrainedModel) -> nn.Module | None:
    """The token embeddings of a stack; `None` if it reads none."""
    if "input_ids" not in forward_parameters(type(module)):
        return None
    try:
        embeddings: nn.Module | None = module.get_input_embeddings()
    except NotImplementedError:  # The architecture does not say which module they are.
        return None
    return embeddings


def _silenced_message(stack: Stack, what: str) -> str:
    model_type = stack.config.model_type
    return (
        f"The {stack.mechanism or 'rotation'} of this {type(stack.module).__name__} "
        f"({model_type}) was disabled, but {what} nevertheless: transformers {transformers.__version__} computes it in "
        "a place unknown to hf_posenc, and it would remain active next to any scheme. Use a version of transformers "
        "that hf_posenc was tested with, or declare how to disable it with "
        f"hf_posenc.register_architecture({model_type!r}, architecture=...)."
    )


def _own_message(stack: Stack, what: str) -> str:
    function = stack.config._attn_implementation if registered_function(stack.config) else None
    own = f" The attention function {function!r} was registered by other code." if function else ""
    return (
        f"The positions of this {type(stack.module).__name__} ({stack.config.model_type}, transformers "
        f"{transformers.__version__}) were disabled, but {what} nevertheless. It has positions of its own, or wraps "
        f"code that has, and they would remain active next to any scheme.{own} Use the class and the attention "
        "function of transformers, or take positions out of your own, and set a wrapper after patch_model."
    )
