"""Checking that a stack in which no position mechanism was found really has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.forward_code import forward_parameters, is_of_transformers
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.observe.short_runs import NotRunnableError, is_runnable, run_briefly, watched
from hf_posenc.patching.observe.swapped_patches import PatchSwap
from hf_posenc.patching.observe.token_order import ORDER, TokenOrder, distance, has_convolution, in_both_orders
from hf_posenc.patching.place.encoding import encodings, for_stacks
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.schemes import NoneConfig


def refuse_hidden_positions(transaction: Transaction, stacks: list[Stack]) -> None:
    """Refuses stacks in which positions act although every mechanism that was found is disabled.

    Text: the stacks are run with the scheme "none" on the same three tokens in two orders. No vector may depend on the
    position of its token, and no attention on the order of its keys; see `TokenOrder`. This finds positions in
    embeddings, in the forward of an attention class and in an attention function, whoever has written them.

    Features and pixels: the same for the first layer and its attention, in stacks in which nothing was found, or whose
    mechanism is disabled by a declaration. The output is not compared for attention after a recurrent layer or
    with a convolution over its keys, both of which depend on the order too.

    Models on the meta device and patched models are not checked.

    Raises:
        UnsupportedError: if such a stack depends on the order of tokens.
    """
    model = transaction.model
    if not is_runnable(model) or encodings(model):
        return
    text = [stack for stack in stacks if stack.grid is None and stack.series is None]
    others = [stack for stack in stacks if stack not in text]
    bare = [stack for stack in others if _nothing_found(stack)]
    silenced = [stack for stack in others if _is_silenced(stack)]
    if bare:
        _refuse_uneven_embeddings(transaction, [stack for stack in bare if stack.series is not None])
        _refuse_order(transaction, bare, _undiscovered_message)
    if silenced or text:
        with transaction.installed(transaction.plan(for_stacks(model, NoneConfig(), stacks), stacks)):
            if silenced:
                _refuse_order(transaction, silenced, _silenced_message)
            if text:
                try:
                    _refuse_order_of_tokens(transaction, text)
                except NotRunnableError:
                    # What other inputs a stock model needs is unknown. Its positions were found in its code.
                    if any(_nothing_found(stack) or _is_silenced(stack) or _has_other_code(stack) for stack in text):
                        raise


def _refuse_order_of_tokens(transaction: Transaction, stacks: list[Stack]) -> None:
    with ExitStack() as hooks:
        seen = [TokenOrder(stack, strict=_nothing_found(stack) or _is_silenced(stack)) for stack in stacks]
        for one in seen:
            hooks.enter_context(one.observed())
        run_briefly(transaction, stacks, len(ORDER), change=in_both_orders)
    for stack, one in zip(stacks, seen, strict=True):
        if one.problem:
            message = _silenced_message if _is_silenced(stack) else _own_message
            raise UnsupportedError((_undiscovered_message if _nothing_found(stack) else message)(stack, one.problem))


def _refuse_order(transaction: Transaction, stacks: list[Stack], message: Callable[[Stack, str], str]) -> None:
    with ExitStack() as hooks:
        seen = [hooks.enter_context(watched(stack)) for stack in stacks]
        run_briefly(transaction, stacks, len(ORDER))
        swaps = {stack.name: PatchSwap() for stack in stacks if stack.grid is not None}
        with _reordered_patches(stacks, swaps), _reordered_embeddings(stacks):
            run_briefly(transaction, stacks, len(ORDER))
    for stack, (embedded, attended, results) in zip(stacks, seen, strict=True):
        if stack.grid is not None and stack.grid.projection is None:
            continue  # The patches of this stack cannot be swapped.
        order = ORDER
        if stack.grid is not None:
            tokens = embedded[0].shape[1] if embedded else 0
            order = swaps[stack.name].order(tokens, stack.grid.suffix_tokens)
        elif stack.series is not None:
            order = _before_the_last(embedded[0].shape[1] if embedded else 0)
        if stack.series is None and _differ(embedded, order):
            raise UnsupportedError(message(stack, "the input of its first layer depends on the position of tokens"))
        if _differ(attended, order) or has_convolution(stack.attentions[0].module):
            continue
        last = [result[:, -1:] for result in results]
        if len(last) == 2 and distance(*last) > 0:
            raise UnsupportedError(message(stack, "the output of its first attention layer depends on token order"))


def _has_other_code(stack: Stack) -> bool:
    """Whether a module of a stack runs code from outside transformers."""
    return any(not is_of_transformers(type(module).forward.__module__) for module in stack.module.modules())


def _is_silenced(stack: Stack) -> bool:
    """Whether a mechanism is disabled that is neither a table nor a rotary function."""
    declared = stack.mechanism or stack.architecture.rotary_method
    return bool(declared or (stack.grid is not None and stack.grid.biases))


def _refuse_uneven_embeddings(transaction: Transaction, stacks: list[Stack]) -> None:
    """Refuses stacks that give equal frames of a series unequal embeddings.

    Convolutions see the frames around a token, so tokens cannot be swapped. In the middle of a constant series all
    tokens are equal unless a position is added to them.
    """
    if not stacks:
        return
    with ExitStack() as hooks:
        seen = [hooks.enter_context(watched(stack)) for stack in stacks]
        run_briefly(transaction, stacks, len(ORDER), constant=True)
    for stack, (embedded, _, _) in zip(stacks, seen, strict=True):
        if stack.first_layer is not None and not embedded:
            raise UnsupportedError(
                f"No position mechanism was found in this {type(stack.module).__name__}, and the input of its first "
                "layer is no tensor in which one could be seen. Declare the architecture with "
                f"hf_posenc.register_architecture({stack.config.model_type!r}, architecture=...)."
            )
        if embedded and embedded[0].shape[1] > 2:
            middle = embedded[0].shape[1] // 2
            if distance(embedded[0][:, middle], embedded[0][:, middle - 1]) > 0:
                raise UnsupportedError(
                    _undiscovered_message(stack, "the input of its first layer depends on the position of tokens")
                )


def _nothing_found(stack: Stack) -> bool:
    rotates = stack.rotaries or any(attention.rotary_functions for attention in stack.attentions)
    architecture = stack.architecture
    declared = stack.mechanism or architecture.rotary_method or architecture.native
    tables = stack.tables or (stack.grid is not None and (stack.grid.tables or stack.grid.biases))
    of_series = stack.series is not None and stack.series.has_sites
    return not (rotates or tables or declared or of_series)


@contextmanager
def _reordered_patches(stacks: list[Stack], swaps: dict[str, PatchSwap]) -> Iterator[None]:
    """Context manager in which the first two patches of every image are swapped."""
    handles = []
    for stack in stacks:
        if stack.grid is not None and stack.grid.projection is not None:
            handles.append(stack.grid.projection.register_forward_hook(swaps[stack.name]))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _reordered_embeddings(stacks: list[Stack]) -> Iterator[None]:
    """Context manager in which two embeddings of stacks that read features are swapped."""

    def reorder(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return (_swapped(args[0]), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: _swapped(kwargs[name])}

    layers = [stack.first_layer for stack in stacks if stack.series is not None and stack.first_layer is not None]
    handles = [layer.register_forward_pre_hook(reorder, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _swapped(embeddings: Tensor) -> Tensor:
    """`(..., length, hidden)` with two tokens swapped."""
    return embeddings[..., _before_the_last(embeddings.shape[-2]), :]


def _before_the_last(tokens: int) -> list[int]:
    """The order in which the two tokens before the last are swapped. The last one sees both in any window."""
    return [*range(tokens - 3), tokens - 2, tokens - 3, tokens - 1] if tokens > 2 else [*range(tokens)]


def _differ(inputs: list[Tensor], order: list[int]) -> bool:
    """Whether the vectors of the same tokens differ between the two calls."""
    # Some architectures prepend their own tokens.
    own = [tensor[:, -len(order) :] for tensor in inputs]
    return len(own) == 2 and own[0].shape[1] == len(order) and distance(own[0][:, order], own[1]) > 0


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
    implementation = getattr(stack.config, "_attn_implementation", None)
    function = dict(ALL_ATTENTION_FUNCTIONS).get(implementation or "")
    registered = not getattr(function, "__module__", "transformers").startswith("transformers")
    own = f" The attention function {implementation!r} was registered by other code." if registered else ""
    return (
        f"The positions of this {type(stack.module).__name__} ({stack.config.model_type}, transformers "
        f"{transformers.__version__}) were disabled, but {what} nevertheless. It has positions of its own, which would "
        f"remain active next to any scheme.{own} Use the class and the attention function of transformers, or take "
        "positions out of your own; a scheme then provides them."
    )
